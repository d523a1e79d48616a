"""Bounds of numbers in schemas as GBNF; None where there are none. ValueError for bounds without a number between."""

from __future__ import annotations

import math
from typing import Any

from ikpy.engine.grammars.decimal_ranges import Bound, decimal_range
from ikpy.engine.grammars.digit_ranges import integer_range


def integer_gbnf(schema: dict[str, Any]) -> str | None:
    """Alternatives for the integers of a schema."""
    lows, highs = [], []
    if "minimum" in schema:
        lows.append(math.ceil(schema["minimum"]))
    if "exclusiveMinimum" in schema:
        lows.append(math.floor(schema["exclusiveMinimum"]) + 1)
    if "maximum" in schema:
        highs.append(math.floor(schema["maximum"]))
    if "exclusiveMaximum" in schema:
        highs.append(math.ceil(schema["exclusiveMaximum"]) - 1)
    if not lows and not highs:
        return None
    return integer_range(max(lows, default=None), min(highs, default=None))


def number_gbnf(schema: dict[str, Any]) -> str | None:
    """Alternatives for the numbers of a schema."""
    lows = _bounds(schema, "minimum", "exclusiveMinimum")
    highs = _bounds(schema, "maximum", "exclusiveMaximum")
    if not lows and not highs:
        return None
    low = max(lows, key=lambda bound: (bound.value, bound.open), default=None)
    return decimal_range(low, min(highs, key=lambda bound: (bound.value, not bound.open), default=None))


def _bounds(schema: dict[str, Any], *names: str) -> list[Bound]:
    return [Bound.of(schema[name], is_open=name.startswith("exclusive")) for name in names if name in schema]
