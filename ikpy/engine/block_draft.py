"""Drafts of layers that guess a block of tokens at once (DFlash), perhaps with a Markov head behind (DSpark)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ikpy._native import core
from ikpy.engine.batch import Batch
from ikpy.engine.inputs import as_input
from ikpy.engine.reading_draft import ReadingDraft
from ikpy.graph.builder import Graph
from ikpy.graph.plan import CompiledPlan, aligned_bytes
from ikpy.graph.planner import plan_arena
from ikpy.models.dflash import DFlash, MarkovHead
from ikpy.signals.held_interrupts import held_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ikpy.engine.context import Context
    from ikpy.graph.ir import Value


class MarkovSteps:
    """Evaluates a Markov head for one token after the other."""

    def __init__(self, head: MarkovHead, n_threads: int) -> None:
        self._token = np.zeros(1, np.int32)
        self._n_threads = n_threads
        g = Graph(core)
        row = g.get_rows(head.rows, as_input(self._token, 1, "token"))
        found = row, g.mul_mat(head.matrix, row)
        arena = plan_arena(g.nodes, {value.buffer for value in found})
        self._memory = aligned_bytes(arena.nbytes)
        self._plan = CompiledPlan(core, g.nodes, arena, self._memory.ctypes.data)
        self._row, self._added = (self._view(value, arena.offsets[value.buffer]) for value in found)
        self._odds = None if head.odds is None else _values(head.odds)
        self._odds_bias = 0.0 if head.odds_bias is None else float(_values(head.odds_bias)[0])

    def _view(self, value: Value, offset: int) -> NDArray[np.float32]:
        start = offset + value.offset
        return self._memory[start : start + 4 * value.shape[0]].view(np.float32)

    @property
    def knows_odds(self) -> bool:
        """Whether guesses' odds of being right can be told."""
        return self._odds is not None

    def added(self, token: int) -> NDArray[np.float32]:
        """What a token adds to the logits [n rows] of the one behind it; until the next call."""
        self._token[0] = token
        self._plan.run(0, self._n_threads)
        return self._added

    def odds(self, state: NDArray[np.float32]) -> float:
        """Those of the guess behind the last token, from its state [D]."""
        assert self._odds is not None
        logit = float(self._odds @ np.concatenate([state, self._row])) + self._odds_bias
        return float(1 / (1 + np.exp(-logit)))


class BlockDraft(ReadingDraft):
    """Entry i of the caches is the model's state of token i; a draft reads the text's last token and masks behind it.

    ``p_min`` is the least probability of a token, or what the drafter's own head says of it.
    """

    name = "dflash"
    guesses_from_entries = False

    def __init__(self, context: Context, *, p_min: float, n_ctx: int, seq_id: int = 0) -> None:
        arch = context.model.arch
        assert isinstance(arch, DFlash)
        super().__init__(context, arch.target_tokens, p_min=p_min, n_ctx=n_ctx, seq_id=seq_id)
        self._arch = arch
        self._markov = None if arch.markov is None else MarkovSteps(arch.markov, context.n_threads)
        self._first = 0 if self._markov and arch.guesses_first else 1
        """Place in the block of the first guess."""

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        p_min = self._p_min if p_min is None else p_min
        n_max = min(n_max, self._n_ctx // 4, self._arch.n_block - self._first)
        end = self._next + len(self._states)
        if n_max < 1 or not 0 < end == len(self._text) == len(tokens) - 1:
            return []
        self._text.append(tokens[-1])
        n = n_max + self._first
        self._catch_up(n)
        try:
            return self._guesses(self._block(tokens[-1], end, n), tokens[-1], p_min)
        finally:
            self._remove(end, -1)

    def _block(self, token: int, end: int, n: int) -> NDArray[np.float32]:
        """Logits [guesses, rows] of a block of n tokens behind ``end``."""
        (context,) = self._contexts
        pos, turn = self._place(end)
        masks = [self._arch.mask_token] * (n - 1)
        batch = Batch.single([token], pos, self._seq_id, "none" if self._first else "all", turn)
        if masks:
            batch.add(masks, pos + 1, self._seq_id, "all", turn)
        with held_back():
            return context.decode(batch, np.zeros((n, self._arch.state_size), np.float32), copy=False)

    def _guesses(self, logits: NDArray[np.float32], token: int, p_min: float) -> list[int]:
        found: list[int] = []
        states = self._contexts[0].embeddings
        for i, own in enumerate(logits):
            row = own if self._markov is None else own + self._markov.added(token)
            best = int(row.argmax())
            if self._markov is not None and self._markov.knows_odds:
                assert states is not None
                probability = self._markov.odds(states[i])
            else:
                probability = float(1.0 / np.exp(row.astype(np.float64) - row[best]).sum())
            if probability < p_min:
                break
            token = best if self._tokens is None else int(self._tokens[best])
            found.append(token)
        return found


def _values(weight: Value) -> NDArray[np.float32]:
    """All elements of a small weight."""
    g = Graph(core)
    numbers = np.arange(weight.shape[1], dtype=np.int32)
    rows = g.get_rows(weight, as_input(numbers, len(numbers), "rows"))
    arena = plan_arena(g.nodes, {rows.buffer})
    memory = aligned_bytes(arena.nbytes)
    CompiledPlan(core, g.nodes, arena, memory.ctypes.data).run(0, 1)
    start = arena.offsets[rows.buffer] + rows.offset
    return memory[start : start + 4 * weight.n_elements].view(np.float32).copy()
