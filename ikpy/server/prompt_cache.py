"""States of earlier texts in host memory, so that a text whose slot was taken is not evaluated again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
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


TOKENS = attrgetter("state.tokens")


class PromptCache:
    """Saved states of at most ``limit`` bytes (below 0: no limit, 0: nothing is kept).

    Those of the same scales lie in the order of their token lists, where the longest common beginnings with a prompt
    are next to its place: with thousands of texts a look at each would take longer than a short prompt.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.n_hits = 0
        self._sorted: dict[tuple[float, ...], list[SavedText]] = {}
        self._by_use: OrderedDict[int, SavedText] = OrderedDict()
        """By identity, most recently used last."""

    def __len__(self) -> int:
        return len(self._by_use)

    def wants(self, tokens: list[int], scales: tuple[float, ...] = ()) -> bool:
        """Whether a state of these tokens would be new: no saved text of the same scales begins with it."""
        if self.limit == 0:
            return False
        texts = self._sorted.get(scales, [])
        following = texts[(at := bisect_left(texts, tokens, key=TOKENS)) : at + 1]
        return all(common_prefix(text.tokens, tokens) < len(tokens) for text in following)

    def has_room_for(self, nbytes: int) -> bool:
        """Whether a state of that size could be kept, if all others went."""
        return self.limit < 0 or nbytes <= self.limit

    def store(self, state: SavedText) -> None:
        """Keeps a state; saved beginnings of its text go, then the ones unused for longest until the limit holds."""
        if not self.has_room_for(state.nbytes):
            return
        for old in self._beginnings(state.tokens, state.scales):
            self._drop(old)
        insort_right(self._sorted.setdefault(state.scales, []), state, key=TOKENS)
        self._by_use[id(state)] = state
        self.nbytes += state.nbytes
        while self.limit >= 0 and self.nbytes > self.limit:
            self._drop(next(iter(self._by_use.values())))

    def best(self, tokens: list[int], scales: tuple[float, ...] = ()) -> tuple[int, SavedText | None]:
        """The longest common beginning with a saved text of these scales that can be gone on from, and that state."""
        n_best, best = 0, None
        for n_same, state in self._nearest(tokens, scales):
            if n_same <= n_best:
                break
            n = state.state.reusable(n_same)
            if n > n_best:
                n_best, best = n, state
        return n_best, best

    def use(self, state: SavedText) -> None:
        """Notes that a state was loaded."""
        self.n_hits += 1
        self._by_use.move_to_end(id(state))

    def clear(self) -> None:
        """Drops all states."""
        self._sorted.clear()
        self._by_use.clear()
        self.nbytes = 0

    def _drop(self, state: SavedText) -> None:
        del self._by_use[id(state)]
        texts = self._sorted[state.scales]
        at = bisect_left(texts, state.tokens, key=TOKENS)
        while texts[at] is not state:
            at += 1
        del texts[at]
        if not texts:
            del self._sorted[state.scales]
        self.nbytes -= state.nbytes

    def _nearest(self, tokens: list[int], scales: tuple[float, ...]) -> Iterator[tuple[int, SavedText]]:
        """Saved texts by the length of the beginning they have in common with a prompt, the longest first."""
        texts = self._sorted.get(scales, [])
        at = bisect_left(texts, tokens, key=TOKENS)
        before, behind = reversed(range(at)), range(at, len(texts))
        sides = (((common_prefix(texts[i].tokens, tokens), texts[i]) for i in side) for side in (before, behind))
        return merge(*sides, key=lambda pair: pair[0], reverse=True)

    def _beginnings(self, tokens: list[int], scales: tuple[float, ...]) -> list[SavedText]:
        """Saved texts that a text begins with, the text itself included.

        They lie in front of its place; behind one of them in this order lie only texts with at least that beginning.
        """
        texts, found = self._sorted.get(scales, []), []
        at = bisect_right(texts, tokens, key=TOKENS)
        while at:
            text = texts[at - 1]
            n_same = common_prefix(text.tokens, tokens)
            if n_same == len(text.tokens):
                found.append(text)
                at -= 1
            else:
                at = bisect_right(texts, tokens[:n_same], 0, at - 1, key=TOKENS)
        return found
