"""Operands of the selective scans of Mamba and Mamba-2, and what the native ops make of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar

import numpy as np

from ikpy.graph.builder import KeptStates
from tests.cpu.kernels.op_graphs import assert_close, value_of
from tests.cpu.kernels.test_recurrent_ops import run
from tests.cpu.models import reference_recurrent as ref

Scan = TypeVar("Scan", bound="ScanOperands")


@dataclass
class ScanOperands:
    """Arrays as those of reference_recurrent.py.

    OP: the name of the op, and of its definition there; LANES: what the last axes of results are, for messages.
    """

    OP: ClassVar[str]
    LANES: ClassVar[tuple[str, ...]]

    x: np.ndarray
    dt: np.ndarray
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    d: np.ndarray
    state: np.ndarray
    slots: np.ndarray

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Results and states after them, by the definition."""
        return getattr(ref, self.OP)(**{f.name: getattr(self, f.name) for f in fields(self)})

    def run(
        self, n_threads: int = 1, copies: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Results and states after them, by the native op. copies: of states, and where that behind each token goes."""
        state = self.state.copy()
        values = [value_of(v) for v in (self.x, self.dt, self.a, self.b, self.c, self.d, state, self.slots)]
        kept = None if copies is None else KeptStates(*(value_of(v) for v in copies))
        out = run(lambda graph: getattr(graph, self.OP)(*values, kept=kept), n_threads)
        return out.reshape(self.x.shape), state

    def tokens(self: Scan, chosen: slice) -> Scan:
        """The op on some of the tokens."""
        names = ("x", "dt", "b", "c", "slots")
        return replace(self, **{name: getattr(self, name)[chosen].copy() for name in names})

    def check(self, what: str, n_threads: int = 1, bound: float = 1e-5) -> None:
        """Results, states, and that slots without tokens keep theirs."""
        (found, state), (out, after) = self.run(n_threads), self.expected()
        if len(self.slots):
            assert_close(what, found, out, ("token", *self.LANES), bound)
        assert_close(f"states, {what}", state, after, ("slot", "head", "row", self.LANES[-1]), bound)
        unused = [i for i in range(len(state)) if i not in self.slots]
        np.testing.assert_array_equal(state[unused], self.state[unused], err_msg=what)
