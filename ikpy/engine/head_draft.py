"""Drafts from the model's own prediction layer (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ikpy.engine.batch import Batch
from ikpy.engine.speculative import Drafter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ikpy.engine.context import Context


class HeadDraft(Drafter):
    """The prediction head's most likely tokens while their probability is at least ``p_min``.

    ``context``: of `Model.prediction_head`, with embeddings. The head attends to what was generated since the text
    began; for the second and further tokens of a draft it reads its own states in place of the model's.
    """

    name = "mtp"
    needs_states = True

    def __init__(self, context: Context, *, p_min: float) -> None:
        self._context, self._p_min = context, p_min
        self._length = 0
        self._pending: list[NDArray[np.float32]] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self._pending = []
        self._forget()

    def observe(self, states: NDArray[np.float32]) -> None:
        self._pending += list(states)

    def draft(self, tokens: Sequence[int], n_max: int) -> list[int]:
        n = len(self._pending)
        if not n or n_max > self._context.n_ctx // 2:
            return []
        # The state behind a token meets the token that follows it; the last one is still to be evaluated.
        logits = self._follow(list(tokens[-n:]), np.array(self._pending))
        self._pending = []
        found: list[int] = []
        while True:
            token = int(logits.argmax())
            if 1.0 / np.exp(logits.astype(np.float64) - logits[token]).sum() < self._p_min:
                break
            found.append(token)
            if len(found) == n_max:
                break
            logits = self._evaluate([token], self._last_state(), self._length + len(found) - 1)
        self._context.kv.seq_rm(0, self._length, -1)
        return found

    def _follow(self, tokens: list[int], states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Evaluates what was added to the text; logits behind it. A full context begins anew with the last half."""
        room = self._context.n_ctx // 2
        if self._length + len(tokens) > room:
            self._forget()
            tokens, states = tokens[-room:], states[-room:]
        step = self._context.n_batch
        for start in range(0, len(tokens), step):
            piece = tokens[start : start + step]
            logits = self._evaluate(piece, states[start : start + step], self._length)
            self._length += len(piece)
        return logits

    def _evaluate(self, tokens: list[int], states: NDArray[np.float32], start: int) -> NDArray[np.float32]:
        return self._context.decode(Batch.single(tokens, start), states)[-1]

    def _last_state(self) -> NDArray[np.float32]:
        assert self._context.embeddings is not None
        return self._context.embeddings[-1:]

    def _forget(self) -> None:
        self._context.kv.clear()
        self._length = 0
