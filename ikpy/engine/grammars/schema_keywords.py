"""Keywords of JSON schemas: what values they may have, and of which type they speak."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

COUNTS = ("minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OF_OBJECTS = ("properties", "patternProperties", "required", "additionalProperties", *COUNTS)
LARGEST = sys.float_info.max
"""Of bounds."""


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    # Integers of JSON may be larger than floats.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


KEYWORD_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("oneOf", "anyOf", "allOf", "enum", "prefixItems"), (_is_list, "a list")),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", *COUNTS), (_is_count, "a whole number from 0")),
    **dict.fromkeys(BOUNDS, (_is_number, "a number")),
    **dict.fromkeys(("properties", "patternProperties"), (lambda value: isinstance(value, dict), "an object")),
    "required": (_is_names, "a list of names"),
    "pattern": (lambda value: isinstance(value, str), "a string"),
}


def malformed(schema: dict[str, Any]) -> str:
    """What is wrong with the value of a keyword that is read; empty if nothing is."""
    for key, (is_fine, kind) in KEYWORD_KINDS.items():
        if key in schema and not is_fine(schema[key]):
            return f"{key} must be {kind}"
    return ""


def implied_type(schema: dict[str, Any]) -> str | None:
    """Type that the keywords of a schema without one speak of; None if they speak of none."""
    if any(key in schema for key in OF_OBJECTS):
        return "object"
    if any(key in schema for key in ("items", "prefixItems", "minItems", "maxItems")):
        return "array"
    if any(key in schema for key in ("pattern", "format", "minLength", "maxLength")):
        return "string"
    if any(key in schema for key in BOUNDS):
        return "number"
    return None
