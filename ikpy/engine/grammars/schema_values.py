"""Values that a schema lists, and the other keywords beside the list: which of them it allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ikpy.engine.grammars.pattern_search import Search
from ikpy.engine.grammars.schema_merge import is_of_type

Sized = type[str] | type[list[Any]] | type[dict[str, Any]]
SIZES: tuple[tuple[str, str, Sized], ...] = (
    ("minLength", "maxLength", str),
    ("minItems", "maxItems", list),
    ("minProperties", "maxProperties", dict),
)
Check = Callable[[Any], bool]


def allowed_values(values: Sequence[Any], schema: dict[str, Any]) -> list[Any]:
    """The values that types, patterns, lengths and bounds of the schema allow; a pattern that cannot be read allows
    all."""
    checks = list(_checks(schema))
    return [value for value in values if all(check(value) for check in checks)]


def _checks(schema: dict[str, Any]) -> Iterator[Check]:
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        yield lambda value: any(is_of_type(value, kind) for kind in kinds)
    if "pattern" in schema:
        search = Search(schema["pattern"])
        yield lambda value: not isinstance(value, str) or search.found(value) is not False
    for low, high, kind in SIZES:
        if low in schema or high in schema:
            yield _of_size(schema.get(low, 0), schema.get(high), kind)
    if "minimum" in schema:
        yield lambda value: not _is_number(value) or value >= schema["minimum"]
    if "exclusiveMinimum" in schema:
        yield lambda value: not _is_number(value) or value > schema["exclusiveMinimum"]
    if "maximum" in schema:
        yield lambda value: not _is_number(value) or value <= schema["maximum"]
    if "exclusiveMaximum" in schema:
        yield lambda value: not _is_number(value) or value < schema["exclusiveMaximum"]


def _of_size(low: float, high: float | None, kind: Sized) -> Check:
    return lambda value: not isinstance(value, kind) or (low <= len(value) and (high is None or len(value) <= high))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
