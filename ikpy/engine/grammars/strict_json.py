"""JSON as other programs read it: without numbers that are not finite, which Python takes and writes."""

from __future__ import annotations

import json
import math
from typing import Any

SHOWN = 32
"""Characters of a number in an error."""


def loads(text: str, decoder: type[json.JSONDecoder] = json.JSONDecoder) -> Any:
    """The value of a JSON text, read by a decoder of this class.

    Raises JSONDecodeError with its place for a text that is no JSON, ValueError also for NaN, infinities, numbers
    beyond the range of 64-bit floats and integers of thousands of digits, RecursionError for one nested too deep.
    """
    return json.loads(text, cls=decoder, parse_constant=_refuse, parse_float=_finite)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:SHOWN]} is beyond the range of numbers")
    return value


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""Reads as `loads` does; for a value at the beginning of a text."""

WITHOUT_CONSTANTS = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)
"""The same, but NaN and infinities are null: values that a model wrote where JSON has no word for them."""
