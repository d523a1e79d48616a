"""GBNF for the decimal numbers between two bounds, without exponents."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from ikpy.engine.grammars.digit_ranges import MOST_DIGITS, integer_range

MOST_DECIMALS = 32
"""Of bounds; those with more are rounded towards the other bound."""
LARGEST = 10**MOST_DIGITS
"""Numbers without a bound have fewer digits."""
_CONTEXT = Context(prec=800)


@dataclass(frozen=True)
class Bound:
    """A number that is the last in a range, or the first outside of it (``open``)."""

    value: Decimal
    open: bool = False

    @classmethod
    def of(cls, value: float, *, is_open: bool) -> Bound:
        """The bound that a JSON number writes."""
        return cls(Decimal(str(value)), is_open)

    def rounded(self, direction: str) -> Bound:
        """A bound of few decimals inside the range."""
        found = self.value.quantize(Decimal(1).scaleb(-MOST_DECIMALS), direction, _CONTEXT)
        return Bound(found, self.open and found == self.value)

    @property
    def whole(self) -> int:
        """The part in front of the point."""
        return int(self.value)

    @property
    def decimals(self) -> str:
        """Digits behind the point, without zeros at their end."""
        return f"{abs(self.value):f}".partition(".")[2].rstrip("0")


def decimal_range(low: Bound | None, high: Bound | None) -> str:
    """Alternatives that match numbers between the bounds; None: no bound on that side.

    Raises ValueError if there are none.
    """
    low, high = low and low.rounded(ROUND_CEILING), high and high.rounded(ROUND_FLOOR)
    parts = []
    zero = Bound(Decimal(0))
    if low is None or low.value < 0:
        nearest = Bound(-high.value, high.open) if high and high.value <= 0 else Bound(Decimal(0), open=True)
        nearest = nearest if nearest.value else Bound(Decimal(0), open=True)  # "-0" is 0
        parts += [f'"-" ({part})' for part in _magnitudes(nearest, low and Bound(-low.value, low.open))]
    if high is None or high.value >= 0:
        parts += _magnitudes(low if low and low.value >= 0 else zero, high)
    if not parts:
        raise ValueError("no number lies between the bounds")
    return " | ".join(parts)


def _magnitudes(low: Bound, high: Bound | None) -> list[str]:
    """Alternatives for numbers from 0."""
    first, last = low.whole, None if high is None or high.value >= LARGEST else high.whole
    if high is None or last is None:
        return [*_with(first, _at_least(low.decimals, low.open, 1), not low.decimals and not low.open),
                f"({integer_range(first + 1, None)}) {FRACTION}"]  # fmt: skip
    if first > last:
        return []
    is_whole = not low.decimals and not low.open
    if first == last:
        inside = _between(low.decimals, high.decimals, (low.open, high.open), 1)
        return _with(first, inside, is_whole and (bool(high.decimals) or not high.open))
    found = _with(first, _at_least(low.decimals, low.open, 1), is_whole)
    if last - first > 1:
        found.append(f"({integer_range(first + 1, last - 1)}) {FRACTION}")
    return found + _with(last, _at_most(high.decimals, high.open, 1), bool(high.decimals) or not high.open)


def _with(whole: int, decimals: str | None, alone: bool) -> list[str]:
    """Alternatives for numbers with this part in front of the point; ``alone``: the point may be missing."""
    found = [f'"{whole}"'] if alone else []
    return found if decimals is None else [*found, f'"{whole}." ({decimals})']


# digits behind the point: at least ``least`` of them; None where nothing fits

FRACTION = f'("." [0-9]{{1,{MOST_DIGITS}}})?'


def _digits(least: int, kind: str = "[0-9]") -> str:
    return f"{kind}{{{least},{MOST_DIGITS}}}"


def _one_of(first: int, last: int) -> list[str]:
    """A digit of a range and any others behind it."""
    return [f"[{first}-{last}] {_digits(0)}"] if first <= last else []


def _at_least(low: str, is_open: bool, least: int) -> str:
    if not low:
        return f'"0"{{0,{MOST_DIGITS - 1}}} [1-9] {_digits(0)}' if is_open else _digits(least)
    digit = int(low[0])
    return " | ".join([*_one_of(digit + 1, 9), f'"{digit}" ({_at_least(low[1:], is_open, 0)})'])


def _at_most(high: str, is_open: bool, least: int) -> str | None:
    if not high:
        return None if is_open else _digits(least, '"0"')
    digit = int(high[0])
    behind = _at_most(high[1:], is_open, 0)
    options = [*([] if least else ['""']), *_one_of(0, digit - 1)]
    return " | ".join([*options, *([] if behind is None else [f'"{digit}" ({behind})'])]) or None


def _between(low: str, high: str, is_open: tuple[bool, bool], least: int) -> str | None:
    if not low and not is_open[0]:
        return _at_most(high, is_open[1], least)
    if not high:
        return None
    first, last = int(low[:1] or 0), int(high[0])
    if first > last:
        return None
    if first == last:
        inside = _between(low[1:], high[1:], is_open, 0)
        return None if inside is None else f'"{first}" ({inside})'
    below = _at_most(high[1:], is_open[1], 0)
    options = [f'"{first}" ({_at_least(low[1:], is_open[0], 0)})', *_one_of(first + 1, last - 1)]
    return " | ".join([*options, *([] if below is None else [f'"{last}" ({below})'])])
