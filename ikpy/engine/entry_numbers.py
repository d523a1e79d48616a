"""Where the entries of a prediction layer are in its cache."""

from __future__ import annotations

from bisect import bisect_right


class EntryNumbers:
    """Positions of entries, of which some may be missing.

    ``gapless``: of caches that are compressed in the order of their positions, in which those of the entries that are
    there follow each other. In others an entry's position is its number.
    """

    def __init__(self, *, gapless: bool) -> None:
        self.gapless = gapless
        self._firsts: list[int] = []
        self._positions: list[int] = []
        """First entries of runs without a gap, and their positions."""
        self.end = 0
        """Position behind the last entry of a cache without gaps."""

    def position(self, entry: int) -> int:
        """The position of an entry, or of the next one that is there."""
        if not self.gapless:
            return entry
        run = bisect_right(self._firsts, entry) - 1
        if run < 0:
            return self._positions[0] if self._positions else 0
        end = self._positions[run + 1] if run + 1 < len(self._positions) else self.end
        return min(self._positions[run] + entry - self._firsts[run], end)

    def add(self, entry: int, n: int) -> None:
        """There are n entries from this one on, behind all others."""
        if not self._firsts or self._last != entry:
            self._firsts.append(entry)
            self._positions.append(self.end)
        self.end += n

    @property
    def _last(self) -> int:
        """The entry behind the last run."""
        return self._firsts[-1] + self.end - self._positions[-1]

    def cut(self, entry: int) -> None:
        """Forgets the entries from this one on."""
        self.end = self.position(entry) if self._firsts and entry > self._firsts[0] else 0
        n = bisect_right(self._firsts, entry - 1)
        del self._firsts[n:], self._positions[n:]

    def follow(self, n: int, end: int) -> None:
        """There are n entries, all in front of this one."""
        self._firsts, self._positions, self.end = ([end - n], [0], n) if n else ([], [], 0)

    def adopt(self, other: EntryNumbers, end: int) -> None:
        """Those of another cache up to an entry."""
        self._firsts, self._positions, self.end = other._firsts[:], other._positions[:], other.end
        self.cut(end)
