"""Drafts from a small model with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ikpy.engine.batch import Batch
from ikpy.engine.prefix import common_prefix
from ikpy.engine.speculative import Drafter, probable_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ikpy.engine.context import Context


class ModelDraft(Drafter):
    """The draft model's most likely tokens while their probability is at least ``p_min``.

    Uses sequence ``seq_id`` of ``context`` and at most ``n_ctx`` of its cells; of a longer text it reads the end only.
    ``n_vocab``: tokens that both models know.
    """

    name = "draft"

    def __init__(self, context: Context, *, p_min: float, n_vocab: int, n_ctx: int, seq_id: int = 0) -> None:
        self._context = context
        self._p_min, self._n_vocab, self._n_ctx, self._seq_id = p_min, n_vocab, n_ctx, seq_id
        self._tokens: list[int] = []
        self._start = 0

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        p_min = self._p_min if p_min is None else p_min
        n_max = min(n_max, self._n_ctx // 2)  # the other half is for the text
        logits = self._follow(tokens, n_max)
        if logits is None:
            return []
        self._context.kv.keep_checkpoint(self._seq_id)
        return probable_tokens(logits, n_max, p_min, lambda found: self._evaluate(found[-1:]))

    def _follow(self, tokens: Sequence[int], n_max: int) -> NDArray[np.float32] | None:
        """Brings the cache in line with the text; logits behind it. None if it has tokens that the model lacks."""
        if len(tokens) <= self._start or len(tokens) - self._start + n_max > self._n_ctx:
            self._start = max(0, len(tokens) - self._n_ctx // 2)
        window = list(tokens[self._start :])
        common = min(common_prefix(self._tokens, window), len(window) - 1)  # the last token is always evaluated
        if max(window[common:]) >= self._n_vocab:
            return None
        kept = self._context.kv.rewind(self._seq_id, common)
        del self._tokens[kept:]
        return self._evaluate(window[kept:])

    def _evaluate(self, tokens: list[int]) -> NDArray[np.float32]:
        n_batch = self._context.n_batch
        for start in range(0, len(tokens), n_batch):
            piece = tokens[start : start + n_batch]
            last = start + len(piece) == len(tokens)
            batch = Batch.single(piece, len(self._tokens), self._seq_id, "last" if last else "none")
            logits = self._context.decode(batch, copy=False)
            self._tokens += piece
        return logits[-1][: self._n_vocab]
