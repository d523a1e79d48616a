"""Drafts of layers that guess a block of tokens at once (DFlash), perhaps with a Markov head (DSpark) or a selector
(DFlash 2) behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy._native import core
from ikpy.engine.batch import Batch
from ikpy.engine.inputs import as_input
from ikpy.engine.reading_draft import ReadingDraft
from ikpy.graph.builder import Graph
from ikpy.graph.plan import CompiledPlan, aligned_bytes
from ikpy.graph.planner import plan_arena
from ikpy.models.dflash import DFlash, MarkovHead, Selector
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


class SelectorWalk:
    """Chooses among the likeliest tokens of every place, one place after the other."""

    def __init__(self, selector: Selector) -> None:
        self._n_best = selector.n_best
        self._before, self._after = _Rows(selector.before, 1), _Rows(selector.after, selector.n_best)
        rank = selector.gate.shape[1]
        self._gate = _Rows(selector.gate, rank)(np.arange(rank)).copy()

    def guesses(
        self,
        logits: NDArray[np.float32],
        states: NDArray[np.float32],
        token: int,
        p_min: float,
        tokens: NDArray[np.int64] | None,
    ) -> list[int]:
        """Tokens from logits [n, rows] and states [n, D] of the places, while their probability among the candidates is
        at least ``p_min``; ``tokens``: of the rows, None if these are all.
        """
        found: list[int] = []
        for row, state in zip(logits, states, strict=True):
            candidates, scores = self.scores(row, state, token, tokens)
            choice = int(scores.argmax())
            if 1.0 / np.exp(scores.astype(np.float64) - scores[choice]).sum() < p_min:
                break
            token = int(candidates[choice])
            found.append(token)
        return found

    def scores(
        self, logits: NDArray[np.float32], state: NDArray[np.float32], token: int, tokens: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Candidates of a place behind a token, and their scores."""
        best = np.argpartition(-logits, self._n_best - 1)[: self._n_best]
        candidates = best if tokens is None else tokens[best]
        condition = self._before(np.array([token]))[0] * (self._gate @ state)
        return candidates, logits[best] + self._after(candidates) @ condition


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
        # Of a drafter that is only measured there are no weights to read.
        markov, selector = (None, None) if context.plan_only else (arch.markov, arch.selector)
        self._markov = None if markov is None else MarkovSteps(markov, context.n_threads)
        self._walk = None if selector is None else SelectorWalk(selector)
        self._first = 0 if self._markov and arch.guesses_first else 1
        """Place in the block of the first guess."""

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        p_min = self._p_min if p_min is None else p_min
        n_max = min(n_max, self._n_ctx // 4, self._arch.n_block - self._first)
        end = self._next + len(self._states)
        if n_max < 1 or not 0 < end == len(self._text) == len(tokens) - 1 or tokens[-1] >= self._n_vocab:
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
        all_rows = self._walk is not None or not self._first
        batch = Batch.single([token], pos, self._seq_id, "all" if all_rows else "none", turn)
        if masks:
            batch.add(masks, pos + 1, self._seq_id, "all", turn)
        with held_back():
            return context.decode(batch, np.zeros((n, self._arch.state_size), np.float32), copy=False)

    def _guesses(self, logits: NDArray[np.float32], token: int, p_min: float) -> list[int]:
        found: list[int] = []
        states = self._contexts[0].embeddings
        if self._walk is not None:
            assert states is not None
            return self._walk.guesses(logits[1:], states[1:], token, p_min, self._tokens)
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


class MarkovDraft(BlockDraft):
    """The same of a drafter with a Markov head, which has a name of its own."""

    name = "dspark"


class _Rows:
    """Rows of a weight as f32, so many at a time; valid until the next call."""

    def __init__(self, weight: Value, n: int) -> None:
        self._numbers = np.zeros(n, np.int32)
        g = Graph(core)
        rows = g.get_rows(weight, as_input(self._numbers, n, "rows"))
        arena = plan_arena(g.nodes, {rows.buffer})
        self._memory = aligned_bytes(arena.nbytes)
        self._plan = CompiledPlan(core, g.nodes, arena, self._memory.ctypes.data)
        start, size = arena.offsets[rows.buffer] + rows.offset, n * weight.shape[0]
        self._rows = self._memory[start : start + 4 * size].view(np.float32).reshape(n, -1)

    def __call__(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        self._numbers[:] = numbers
        self._plan.run(0, 1)
        return self._rows


def _values(weight: Value) -> NDArray[np.float32]:
    """All elements of a small weight."""
    n = weight.shape[1]
    return _Rows(weight, n)(np.arange(n)).reshape(-1).copy()
