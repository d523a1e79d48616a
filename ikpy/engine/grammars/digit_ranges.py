"""GBNF for the decimal integers between two bounds."""

from __future__ import annotations

MOST_DIGITS = 16


def integer_range(low: int | None, high: int | None) -> str:
    """Alternatives that match exactly the integers ``low <= n <= high`` without leading zeros.

    None means no bound on that side; unbounded sides are limited to numbers of 16 digits.
    """
    if low is not None and high is not None and low > high:
        raise ValueError(f"empty integer range {low} to {high}")
    parts = []
    if low is None or low < 0:
        smallest = None if low is None else -low
        largest = 1 if high is None or high >= 0 else -high
        parts += [f'"-" ({"|".join(_magnitudes(largest, smallest))})']
    if high is None or high >= 0:
        parts += _magnitudes(max(0, low or 0), high)
    return " | ".join(parts)


def _magnitudes(low: int, high: int | None) -> list[str]:
    """Alternatives for non-negative integers."""
    if high is None:
        digits = len(str(low))
        same_length = _same_length(str(low), "9" * digits)
        if digits >= MOST_DIGITS:
            return same_length
        return [*same_length, f"[1-9] [0-9]{{{digits},{MOST_DIGITS - 1}}}"]
    found = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first = low if digits == len(str(low)) else 10 ** (digits - 1)
        last = high if digits == len(str(high)) else 10**digits - 1
        found += _same_length(str(first), str(last))
    return found


def _same_length(low: str, high: str) -> list[str]:
    """Alternatives for the numbers between two texts of equal length."""
    if not low:
        return ['""']
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return [f"[0-9]{{{len(low)}}}"]
    if low[0] == high[0]:
        return [f'"{low[0]}" ({"|".join(_same_length(low[1:], high[1:]))})']
    found = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        found.append(f'"{first}" ({"|".join(_same_length(low[1:], "9" * rest))})')
        first += 1
    ending = None
    if high[1:] != "9" * rest:
        ending = f'"{last}" ({"|".join(_same_length("0" * rest, high[1:]))})'
        last -= 1
    if first <= last:
        found.append(f"[{first}-{last}]" + (f" [0-9]{{{rest}}}" if rest else ""))
    return found + ([ending] if ending else [])
