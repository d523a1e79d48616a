"""Matrix states of RWKV against their definition in float64; test_tiers.py runs this file on every tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from benchmarks.reference_attention import NativeOp
from ikpy.graph.builder import Graph, KeptStates, Removal
from ikpy.graph.elementwise import EXPONENTIAL
from ikpy.graph.ir import F32, Value
from tests.cpu.kernels.op_graphs import assert_close, value_of
from tests.cpu.kernels.test_recurrent_ops import mixed_slots, run, some_kept
from tests.cpu.models import reference_rwkv as ref

RESULT, STATES = ("token", "head", "column"), ("slot", "head", "row", "column")
RULES = ("plain", "first", "removing")


@dataclass
class Wkv:
    """Operands of the op, arrays as those of the reference."""

    r: np.ndarray
    k: np.ndarray
    v: np.ndarray
    decay: np.ndarray
    state: np.ndarray
    slots: np.ndarray
    first: np.ndarray | None = None
    removal: np.ndarray | None = None
    written: np.ndarray | None = None

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Results and states after them, by the definition."""
        return ref.wkv(**{f.name: getattr(self, f.name) for f in fields(self)})

    def call(self, graph: Graph, value: Callable[[np.ndarray], Value], state: Value, kept: KeptStates | None) -> Value:
        """The op in a graph, on values made of the arrays."""
        options: dict[str, Any] = {"kept": kept}
        if self.first is not None:
            options["first"] = value(self.first)
        if self.removal is not None and self.written is not None:
            options["removal"] = Removal(value(self.removal), value(self.written))
        r, k, v, decay = (value(a) for a in (self.r, self.k, self.v, self.decay))
        return graph.wkv(r, k, v, decay, state, value(self.slots), **options)

    def run(
        self, n_threads: int = 1, copies: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Results and states after them, by the native op. copies: of states, and where that behind each token goes."""
        state = self.state.copy()
        kept = None if copies is None else KeptStates(*(value_of(a) for a in copies))
        return run(lambda graph: self.call(graph, value_of, value_of(state), kept), n_threads)[0], state

    def tokens(self, chosen: slice) -> Wkv:
        """The op on some of the tokens."""
        names = ("r", "k", "v", "decay", "slots", "removal", "written")
        arrays = {name: getattr(self, name) for name in names}
        return replace(self, **{name: a[chosen].copy() for name, a in arrays.items() if a is not None})

    def check(self, what: str, n_threads: int = 1, bound: float = 1e-5) -> None:
        """Results, states, and that slots without tokens keep theirs."""
        (found, state), (out, after) = self.run(n_threads), self.expected()
        if len(self.slots):
            assert_close(what, found, out, RESULT, bound)
        assert_close(f"states, {what}", state, after, STATES, 4 * bound)
        unused = [i for i in range(len(state)) if i not in self.slots]
        np.testing.assert_array_equal(state[unused], self.state[unused], err_msg=what)


def make_wkv(
    rng: np.random.Generator, n_tokens: int, shape: tuple[int, int, int, int], rule: str, n_slots: int = 4
) -> Wkv:
    """Random operands; r, k and v are parts of the rows of one array. shape: dk, dv, H, Hv."""
    dk, dv, heads, value_heads = shape
    widths = (dk * heads, dk * heads, dv * value_heads)
    rows = rng.standard_normal((n_tokens, 3 + sum(widths))).astype(np.float32)
    r, k, v = np.split(rows[:, 3:], np.cumsum(widths[:2]), axis=1)
    r, k, v = r.reshape(-1, heads, dk), k.reshape(-1, heads, dk), v.reshape(-1, value_heads, dv)
    decay = np.exp(-rng.exponential(0.3, r.shape)).astype(np.float32)
    state = rng.standard_normal((n_slots, heads, dk, dv)).astype(np.float32)
    wkv = Wkv(r, k, v, decay, state, mixed_slots(rng, n_tokens, n_slots))
    if rule == "first":
        wkv.first = rng.standard_normal((heads, dk)).astype(np.float32)
    if rule == "removing":
        keys = rng.standard_normal(r.shape)
        wkv.removal = (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).astype(np.float32)
        wkv.written = (wkv.removal * rng.random(r.shape)).astype(np.float32)
    return wkv


SHAPES = [
    (64, 64, 2, 2),
    (32, 40, 4, 2),
    (20, 33, 2, 2),
    (1, 1, 1, 1),
    (48, 100, 6, 3),
    (7, 17, 8, 1),
    (96, 31, 1, 1),
]


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wkv(shape: tuple[int, int, int, int], rule: str, n_threads: int) -> None:
    """Several sequences in a batch, few and many tokens of each, heads that share values."""
    rng = np.random.default_rng(5)
    for n_tokens in (0, 1, 2, 9, 33, 140):
        wkv = make_wkv(rng, n_tokens, shape, rule)
        wkv.check(f"{n_tokens} tokens", n_threads)
        replace(wkv, slots=np.full(n_tokens, 2, np.int32)).check(f"{n_tokens} tokens of one sequence", n_threads)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", [[0.0], [1.0], [1.0, 0.0, 1e-38, 0.5]])
def test_decays(decay: list[float], rule: str) -> None:
    """Nothing is left, all is left, and either."""
    rng = np.random.default_rng(6)
    wkv = make_wkv(rng, 30, (64, 40, 2, 2), rule)
    wkv.decay = rng.choice(decay, wkv.decay.shape).astype(np.float32)
    wkv.check(f"{decay}")


@pytest.mark.parametrize("rule", RULES)
def test_results_depend_on_neither_threads_nor_batches(rule: str) -> None:
    wkv = make_wkv(np.random.default_rng(7), 60, (64, 200, 2, 2), rule)
    whole, state = wkv.run()
    for n_threads in (2, 3, 8):
        for one, another in zip(wkv.run(n_threads), (whole, state), strict=True):
            np.testing.assert_array_equal(one, another)
    pieces = []
    for t in range(len(wkv.slots)):
        out, wkv.state = wkv.tokens(slice(t, t + 1)).run()
        pieces.append(out)
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(wkv.state, state)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n_tokens", [1, 17, 60])
def test_copies_of_states(n_tokens: int, rule: str, n_threads: int) -> None:
    """Behind some tokens, in the bits of a run that ends there, as are results and states."""
    rng = np.random.default_rng(13)
    wkv = make_wkv(rng, n_tokens, (64, 100, 2, 2), rule)
    kept = some_kept(rng, n_tokens)
    copies = np.full((n_tokens, *wkv.state.shape[1:]), np.nan, np.float32)
    found = wkv.run(n_threads, (copies, kept))
    for one, another in zip(found, wkv.run(), strict=True):
        np.testing.assert_array_equal(one, another)
    for t in np.flatnonzero(kept >= 0):
        behind = wkv.tokens(slice(0, t + 1)).run()[1]
        np.testing.assert_array_equal(copies[kept[t]], behind[wkv.slots[t]], err_msg=f"behind token {t}")
    assert np.isnan(copies[[i for i in range(n_tokens) if i not in kept]]).all()


@pytest.mark.parametrize("name", ["r", "k", "v", "decay", "removal", "written"])
def test_broken_numbers_of_a_sequence_spoil_no_other(name: str) -> None:
    """NaN and infinity stay in their sequence and are seen there."""
    wkv = make_wkv(np.random.default_rng(9), 60, (64, 40, 1, 1), "removing", n_slots=3)
    wkv.slots[:] = np.arange(60) % 3
    good, state = wkv.run()
    for bad in (np.nan, np.inf):
        getattr(wkv, name)[31] = bad
        found, after = wkv.run()
        np.testing.assert_array_equal(found[wkv.slots != 1], good[wkv.slots != 1])
        np.testing.assert_array_equal(after[[0, 2]], state[[0, 2]])
        if np.isnan(bad):
            assert np.isnan(found[31]).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    wkv = make_wkv(np.random.default_rng(10), 3, (8, 8, 4, 2), "removing")
    odd = {
        "k": wkv.k[:, :1],
        "v": np.concatenate([wkv.v, wkv.v[:, :1]], axis=1),
        "decay": wkv.decay[:2],
        "state": wkv.state[..., :7],
        "slots": wkv.slots[:2],
        "removal": wkv.removal[..., :7] if wkv.removal is not None else None,
    }
    for name, array in odd.items():
        assert array is not None
        with pytest.raises(ValueError, match="states"):
            replace(wkv, **{name: array.copy()}).run()
    first = make_wkv(np.random.default_rng(10), 3, (8, 8, 4, 2), "first")
    with pytest.raises(ValueError, match="first"):
        replace(first, first=np.ones((4, 7), np.float32)).run()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_exponential(n_threads: int) -> None:
    x = np.concatenate([np.linspace(-87, 88, 7001), [-1e4, -np.inf, 0.0, np.nan]]).astype(np.float32)
    x = np.resize(x, (5, 1401))
    op = NativeOp("unary")
    out = np.full_like(x, np.inf)
    op.op["dst"], op.op["src"][0, 0] = op.dense(out, F32), op.dense(x, F32)
    op.op["ip"][0, 0] = EXPONENTIAL
    op.run(n_threads=n_threads)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=4e-7, atol=2e-38)
