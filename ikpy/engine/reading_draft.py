"""Drafts from a layer of a file of its own that reads inputs of several layers of the model (EAGLE-3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ikpy.engine.head_draft import HeadDraft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ikpy.engine.context import Context


class ReadingDraft(HeadDraft):
    """As drafts of a prediction head, but that texts with pictures get none. ``tokens``: the model's token i64 of every
    row of the layer's output matrix, None if it has a row for each.
    """

    name = "eagle3"

    def __init__(
        self, context: Context, tokens: NDArray[np.int64] | None, *, p_min: float, n_ctx: int, seq_id: int = 0
    ) -> None:
        super().__init__(context, p_min=p_min, n_ctx=n_ctx, seq_id=seq_id)
        self._tokens, self._n_vocab = tokens, context.model.hparams.n_vocab

    def observe(self, text: Sequence[int], states: NDArray[np.float32]) -> None:
        if max(text, default=0) < self._n_vocab:
            super().observe(text, states)
        else:  # rows of pictures, of the model's width
            self._forget()

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        return super().draft(tokens, n_max, p_min) if tokens[-1] < self._n_vocab else []

    def _catch_up(self, n_drafted: int = 0) -> NDArray[np.float32] | None:
        logits = super()._catch_up(n_drafted)
        return None if logits is None else self._of_all_tokens(logits)

    def _logits_behind(self, found: list[int], end: int, read: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        return self._of_all_tokens(super()._logits_behind(found, end, read))

    def _of_all_tokens(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [n_vocab]; tokens that the layer does not know are impossible."""
        if self._tokens is None:
            return logits
        spread = np.full(self._n_vocab, -np.inf, np.float32)
        spread[self._tokens] = logits
        return spread
