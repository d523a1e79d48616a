"""GBNF for the pairs of an object and the items of an array, whose number may be limited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_STATES = 5000
"""Places between pairs times pairs that may have been written: each is a rule."""


@dataclass(frozen=True)
class Pairs:
    """Pairs that stand in this order, some of which may be missing, then any number of ``extra`` (None: no other).

    ``named``: GBNF of each pair and whether it must be there; ``space``: GBNF of blanks behind a comma.
    """

    named: Sequence[tuple[str, bool]]
    extra: str | None
    space: str

    def chained(self, add: Callable[[str], str]) -> str:
        """GBNF of any number of pairs with the commas between them. ``add`` makes a rule."""
        rest = f'("," {self.space} {self.extra})*' if self.extra else '""'
        start = f"({self.extra} {rest})?" if self.extra else '""'
        for pair, needed in reversed(self.named):
            after = add(rest)
            start = add(f"{pair} {after}" if needed else f"{pair} {after} | {start}")
            rest = f'("," {self.space} {pair}){"" if needed else "?"} {after}'
        return start

    def counted(self, low: int, high: int | None, add: Callable[[str], str]) -> str | None:
        """GBNF of ``low`` to ``high`` pairs (None: no limit) with the commas between them; None if there are none.

        ``add`` makes a rule. Raises ValueError for more rules than there may be.
        """
        most = max(low, 1) if high is None else high
        if (len(self.named) + 1) * (most + 1) > MOST_STATES:
            raise ValueError("too many properties for a limit of their number")
        behind = [self._extras(n, low, high) for n in range(min(len(self.named), most) + 1)]
        for i in reversed(range(len(self.named))):
            bodies = [self._from(i, n, behind, high) for n in range(min(i, most) + 1)]
            behind = [body if body is None or i == 0 else add(body) for body in bodies]
        return behind[0]

    def _from(self, i: int, n: int, behind: list[str | None], high: int | None) -> str | None:
        """What may follow ``n`` pairs from the i-th on; ``behind``: from the next one on, by number of pairs."""
        pair, needed = self.named[i]
        options = [] if needed else [behind[n]]
        if n + 1 < len(behind) or high is None:
            after = behind[min(n + 1, len(behind) - 1)]
            comma = f'"," {self.space} ' if n else ""
            options.insert(0, None if after is None else f"{comma}{pair} {after}")
        return " | ".join(option for option in options if option is not None) or None

    def _extras(self, n: int, low: int, high: int | None) -> str | None:
        """Pairs without a place of their own behind ``n`` others."""
        least, most = max(0, low - n), None if high is None else high - n
        if most is not None and least > most:
            return None
        if self.extra is None or most == 0:
            return None if least else '""'
        top = "" if most is None else str(most - (n == 0))
        more = f'("," {self.space} {self.extra}){{{max(0, least - (n == 0))},{top}}}'
        if n:
            return more
        return f"({self.extra} {more})" if least else f"({self.extra} {more})?"


@dataclass(frozen=True)
class Items:
    """Items of an array: those it begins with, the last of which may be missing behind the first ``needed``, and any
    number of ``more`` (None: no further one). ``space``: GBNF of blanks behind a comma."""

    first: Sequence[str]
    more: str | None
    needed: int
    space: str

    def counted(self, low: int, high: int | None) -> str:
        """GBNF of ``low`` to ``high`` items (None: no limit) with the commas between them."""
        n, rest = len(self.first), ""
        if self.more is not None and (high is None or high > n):
            top = "" if high is None else str(high - max(n, 1))
            rest = f'("," {self.space} {self.more}){{{max(0, low - max(n, 1))},{top}}}'
            if not n:
                rest = f"({self.more} {rest})" + ("?" if low == 0 else "")
        for i, item in reversed(list(enumerate(self.first))):
            rest = f'"," {self.space} {item} {rest}' if i else f"{item} {rest}"
            rest = f"({rest})?" if i >= self.needed else rest
        return rest
