"""Classifier-free guidance (arXiv:2306.17806): away from what a negative prompt would make the model write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ikpy.tools.generation import GrowingSequence

if TYPE_CHECKING:
    from ikpy.tools.generation import SequenceContext


class Guidance:
    """log p = log p_negative + scale * (log p_text - log p_negative), scale 1 being no guidance.

    ``context`` is used for the negative prompt and what is generated behind it, and nothing else.
    """

    def __init__(self, context: SequenceContext, negative: Sequence[int], scale: float) -> None:
        self._sequence = GrowingSequence(context, n_keep=len(negative))
        self._pending = list(negative)
        self._scale = np.float32(scale)
        self._negative: NDArray[np.float32] = np.empty(0, np.float32)

    def accept(self, token: int) -> None:
        """Appends a generated token."""
        self._pending.append(token)

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Guided logits float32 [n_vocab]. Raises ContextFullError."""
        if self._pending:
            self._negative, self._pending = log_softmax(self._sequence.feed(self._pending)), []
        return self._negative + self._scale * (log_softmax(logits) - self._negative)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logarithms of the probabilities."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted, dtype=np.float64).sum()).astype(np.float32)
