"""States of earlier texts in host memory, so that a text whose slot was taken is not evaluated again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ikpy.engine.prefix import common_prefix

if TYPE_CHECKING:
    from ikpy.engine.session import SequenceState


@dataclass(frozen=True)
class SavedText:
    """The state of a slot's sequence and those of its drafters, None for drafters that have none; the scales of all
    adapters that it was evaluated with."""

    state: SequenceState
    drafts: tuple[SequenceState | None, ...] = ()
    scales: tuple[float, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Tokens of the text."""
        return self.state.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.state.nbytes + sum(draft.nbytes for draft in self.drafts if draft is not None)


class PromptCache:
    """Saved states, most recently used last, of at most ``limit`` bytes (below 0: no limit, 0: nothing is kept)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.n_hits = 0
        self._states: list[SavedText] = []

    def __len__(self) -> int:
        return len(self._states)

    def wants(self, tokens: list[int], scales: tuple[float, ...] = ()) -> bool:
        """Whether a state of these tokens would be new: no saved text of the same scales begins with it."""
        saved = (state.tokens for state in self._states if state.scales == scales)
        return self.limit != 0 and all(common_prefix(text, tokens) < len(tokens) for text in saved)

    def has_room_for(self, nbytes: int) -> bool:
        """Whether a state of that size could be kept, if all others went."""
        return self.limit < 0 or nbytes <= self.limit

    def store(self, state: SavedText) -> None:
        """Keeps a state; saved beginnings of its text go, then the ones unused for longest until the limit holds."""
        if not self.has_room_for(state.nbytes):
            return
        alike = [s for s in self._states if s.scales == state.scales]
        covered = [s for s in alike if common_prefix(s.tokens, state.tokens) == len(s.tokens)]
        for old in covered:
            self._drop(old)
        self._states.append(state)
        self.nbytes += state.nbytes
        while self.limit >= 0 and self.nbytes > self.limit:
            self._drop(self._states[0])

    def best(self, tokens: list[int], scales: tuple[float, ...] = ()) -> tuple[int, SavedText | None]:
        """The longest common beginning with a saved text of these scales that can be gone on from, and that state."""
        alike = (state for state in self._states if state.scales == scales)
        found = ((state.state.reusable(common_prefix(state.tokens, tokens)), state) for state in alike)
        return max(found, key=lambda pair: pair[0], default=(0, None))

    def use(self, state: SavedText) -> None:
        """Notes that a state was loaded."""
        self.n_hits += 1
        self._states.append(self._states.pop(self._at(state)))

    def clear(self) -> None:
        """Drops all states."""
        self._states.clear()
        self.nbytes = 0

    def _drop(self, state: SavedText) -> None:
        del self._states[self._at(state)]
        self.nbytes -= state.nbytes

    def _at(self, state: SavedText) -> int:
        """Place of a state, by identity: states hold arrays, whose comparison is element-wise."""
        return next(i for i, other in enumerate(self._states) if other is state)
