"""Bounded cache of token ids per word."""

from __future__ import annotations

from collections.abc import Callable


class WordCache(dict[str, list[int]]):
    """Maps a word to its token ids, computing them on first use; emptied when it grows too large.

    Words longer than ``MAX_WORD`` characters are computed every time: they hardly ever repeat.
    """

    MAX_ENTRIES = 200_000
    MAX_WORD = 256

    def __init__(self, compute: Callable[[str], list[int]]):
        super().__init__()
        self._compute = compute

    def __missing__(self, word: str) -> list[int]:
        ids = self._compute(word)
        if len(word) <= self.MAX_WORD:
            if len(self) >= self.MAX_ENTRIES:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, words: list[str]) -> list[int]:
        """Ids of all words, concatenated."""
        out: list[int] = []
        for word in words:
            out += self[word]
        return out
