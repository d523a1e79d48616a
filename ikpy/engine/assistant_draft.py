"""Drafts from layers of a file of its own that attend to the caches of the model (drafters of Gemma 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ikpy.engine.speculative import Drafter, probable_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ikpy.engine.cache_reader import CacheReader


class AssistantDraft(Drafter):
    """The drafter's most likely tokens while their probability is at least ``p_min``.

    It keeps nothing of a text but the last state of the model: all else is in the model's caches. All tokens of a draft
    are at the position of the first one, as the layers were trained.
    """

    name = "mtp"
    needs_states = True

    def __init__(self, reader: CacheReader, *, p_min: float, seq_id: int = 0) -> None:
        self._reader, self._p_min, self._seq_id = reader, p_min, seq_id
        self._length = 0
        """Tokens of the text behind whose last one the state is; 0: none is known."""
        self._state: NDArray[np.float32] | None = None

    def observe(self, text: Sequence[int], states: NDArray[np.float32]) -> None:
        if len(states):
            self._length, self._state = len(text), states[-1].copy()

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        p_min, pos = self._p_min if p_min is None else p_min, len(tokens) - 1
        known = self._state is not None and self._length == pos > 0
        if n_max < 1 or not known or not self._reader.holds(self._seq_id, pos):
            return []
        assert self._state is not None
        self._reader.refresh(self._seq_id)
        logits, read = self._reader.evaluate(tokens[-1], pos, self._seq_id, self._state)

        def follow(found: list[int]) -> NDArray[np.float32]:
            nonlocal read
            logits, read = self._reader.evaluate(found[-1], pos, self._seq_id, read)
            return logits

        return probable_tokens(logits, n_max, p_min, follow)

    def adopt(self, other: Drafter, n: int) -> None:
        assert isinstance(other, AssistantDraft)
        self._length, self._state = (n, other._state) if n == other._length else (0, None)

    def shift(self, keep: int, drop: int) -> None:
        self._length = self._length - drop if self._length >= keep + drop else 0
