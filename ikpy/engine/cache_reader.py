"""Runs layers of a drafter that attend to the caches of another model's context and store nothing there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ikpy._native import core
from ikpy._native.steps import Steps
from ikpy.engine.graphs import MicroBatchGraphs
from ikpy.engine.inputs import BatchInputs
from ikpy.engine.micro_batches import MAX_POSITION
from ikpy.engine.params import DRAFT_THREAD_SETS, ContextParams
from ikpy.engine.paused_collection import paused_collection
from ikpy.engine.plans import Plans, Shape
from ikpy.models.gemma4_assistant import Gemma4Assistant

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ikpy.engine.context import Context
    from ikpy.engine.model import Model


class CacheReader:
    """Evaluates single tokens of ``drafter``, on the CPU, over the caches of ``context``.

    Of caches on devices `refresh` copies to host memory what the layers have of a sequence.
    """

    def __init__(self, drafter: Model, context: Context, n_threads: int, log: Callable[[str], None]) -> None:
        arch, kv = drafter.arch, context.kv
        assert isinstance(arch, Gemma4Assistant)
        self._context, self._n_threads = context, n_threads
        self._read = [key for key in kv.tensors if key[0] in arch.cache_layers]
        self._inputs = BatchInputs(1, kv.cells, n_adapters=0, state_size=arch.state_size, keep_slots=None)
        n_vocab, pad = drafter.hparams.n_vocab, context.params.cell_multiple
        self._steps = Steps(core.run_plan, self._inputs, kv.tables, n_vocab, MAX_POSITION, pad, 1)
        params = ContextParams(embeddings=True)
        graphs = MicroBatchGraphs(drafter, params, context.graph_params, self._inputs, kv)
        self._plans = Plans(
            graphs,
            self._steps,
            None,
            threads=(n_threads, n_threads),
            thread_sets=DRAFT_THREAD_SETS,
            plan_only=context.plan_only,
            reads=None,
            log=log,
        )
        with paused_collection():
            self._plans.reserve({Shape(1, 1): graphs.nodes(1, 1)})

    def holds(self, seq_id: int, n: int) -> bool:
        """Whether the caches hold the first n tokens of a sequence, as they are to be read, and no others of it."""
        kv = self._context.kv
        return not kv.shifted and kv.seq_pos_max(seq_id) == n - 1

    def refresh(self, seq_id: int) -> None:
        """Takes over what the model has stored of a sequence."""
        if self._context.devices is None:
            return
        kv, wanted = self._context.kv, dict[str, list[tuple[int, int]]]()
        runs = {window: _runs(cells.matching(seq_id, -1, -1)) for window, cells in kv.cells.items()}
        for key in self._read:
            value = kv.tensors[key]
            start, row = value.offset, value.strides[2]
            rows = wanted.setdefault(value.buffer.name, [])
            rows += [(start + a * row, start + b * row) for a, b in runs[kv.window_of[key]]]
        self._context.sync_caches_to_host(wanted)

    def evaluate(
        self, token: int, pos: int, seq_id: int, state: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits float32 [n_vocab] behind a token at a position, and its state [state_size].

        ``state``: that behind the token before it.
        """
        self._inputs.arrays[:3, 0] = token, pos, seq_id
        self._inputs.write_states(state[None])
        ready = self._plans.get(1, 1)
        ready.plan.run(self._steps.n_kv(), self._n_threads, self._steps.work)
        logits, found, _ = ready.results
        assert logits is not None and found is not None
        return logits[0].copy(), found[0].copy()


def _runs(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and end of every run of chosen cells, boolean [n]."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
