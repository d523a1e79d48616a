"""JSON schemas that must all hold, as one schema: allOf, and keywords beside $ref, anyOf and oneOf."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Flat = dict[str, Any]
"""A schema without $ref, allOf, anyOf and oneOf at its top; const is an enum of one value."""

JOINING = ("$ref", "allOf", "anyOf", "oneOf")
CONSTRAINTS = (
    *("type", "properties", "patternProperties", "required", "additionalProperties", "items", "prefixItems"),
    *("enum", "const"),
    *("pattern", "format", "minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)
"""Keywords that the conversion reads; all others say nothing about the text."""


TYPE_NAMES = {
    int: ("integer", "number"),
    str: ("string",),
    type(None): ("null",),
    list: ("array",),
    dict: ("object",),
}
"""Types that a value of JSON has; see `is_of_type` for the others."""


class ContradictionError(Exception):
    """No value fits both of two schemas."""


def components(schema: dict[str, Any]) -> list[Any]:
    """The parts of ``schema`` that must all hold, those that allow everything left out."""
    own = {key: schema[key] for key in CONSTRAINTS if key in schema}
    joined = [{key: schema[key]} for key in ("$ref", "anyOf", "oneOf") if key in schema]
    parts = [own, *joined, *schema.get("allOf", ())]
    return [part for part in parts if allows_nothing(part) or (part is not True and not _says_nothing(part))]


def _says_nothing(part: Any) -> bool:
    return isinstance(part, dict) and not any(key in part for key in (*CONSTRAINTS, *JOINING))


def allows_nothing(schema: Any) -> bool:
    """Whether a schema is plainly one of no value: false, or what generators write for it."""
    return schema is False or (isinstance(schema, dict) and schema.get("not") in (True, {}))


class Conjunction:
    """Finds the alternatives of schemas that must hold together.

    ``resolve`` gives the schema of a reference and raises ValueError if there is none; ``look_at`` is called with every
    schema that is looked at, and raises where there are too many or one is malformed.
    """

    def __init__(self, resolve: Callable[[Any], Any], look_at: Callable[[Any], None]) -> None:
        self.resolve = resolve
        self.look_at = look_at

    def of(self, parts: Sequence[Any]) -> list[Flat]:
        """Schemas one of which holds where all parts do. Raises ValueError for parts that cannot be joined."""
        found: list[Flat] = [{}]
        for part in parts:
            options = list(self.alternatives(part))
            found = [joined for flat in found for option in options if (joined := self.both(flat, option)) is not None]
        return found

    def alternatives(self, schema: Any) -> Iterator[Flat]:
        """Flat schemas one of which holds where ``schema`` does."""
        self.look_at(schema)
        if allows_nothing(schema):
            return
        if schema is True:
            yield {}
            return
        flat = {key: schema[key] for key in CONSTRAINTS if key in schema and key != "const"}
        if "const" in schema:
            flat["enum"] = [schema["const"]]
        found = self.of(schema.get("allOf", ()))
        if "$ref" in schema:
            found = self.joined(found, self.alternatives(self.resolve(schema["$ref"])))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                options = [flat for option in schema[key] for flat in self.alternatives(option)]
                found = self.joined(found, options)
        yield from self.joined([flat], found)

    def joined(self, flats: Sequence[Flat], options: Any) -> list[Flat]:
        options = list(options)
        return [both for flat in flats for option in options if (both := self.both(flat, option)) is not None]

    def both(self, a: Flat, b: Flat) -> Flat | None:
        """The schema of what fits a and b; None if nothing does."""
        self.look_at(True)
        result = a | b
        try:
            for key in a.keys() & b.keys():
                result[key] = _both_values(key, a[key], b[key])
            if "properties" in result:
                result["properties"] = result["properties"] | _further(a, b) | _further(b, a)
            if "enum" in result and "type" in result:
                result["enum"] = _values_of_type(result["enum"], result["type"])
        except ContradictionError:
            return None
        return result


def _both_values(key: str, a: Any, b: Any) -> Any:
    if key == "type":
        return _both_types(a, b)
    if key == "enum":
        return _common_values(a, b)
    if key == "required":
        return list(dict.fromkeys([*a, *b]))
    if key in ("properties", "patternProperties"):
        return {name: _both_schemas([p[name] for p in (a, b) if name in p]) for name in a | b}
    if key in ("additionalProperties", "items"):
        return _both_schemas([a, b])
    if key in ("minItems", "minLength", "minProperties", "minimum", "exclusiveMinimum"):
        return max(a, b)
    if key in ("maxItems", "maxLength", "maxProperties", "maximum", "exclusiveMaximum"):
        return min(a, b)
    if a != b:
        raise ValueError(f"{key} {json.dumps(a)[:60]} and {json.dumps(b)[:60]} cannot be joined")
    return a


def _further(named: Flat, other: Flat) -> dict[str, Any]:
    """The properties that one schema names and the other does not, with what that asks of further ones."""
    more, known = other.get("additionalProperties"), other.get("properties", {})
    if not isinstance(more, dict) or "patternProperties" in other:
        return {}
    found = named.get("properties", {})
    return {name: _both_schemas([schema, more]) for name, schema in found.items() if name not in known}


def _both_schemas(schemas: list[Any]) -> Any:
    telling = [schema for schema in schemas if schema is not True and schema != {}]
    if False in telling:
        return False
    if len(telling) > 1 and any(schema != telling[0] for schema in telling):
        return {"allOf": telling}
    return telling[0] if telling else True


def _both_types(a: Any, b: Any) -> Any:
    first, second = (value if isinstance(value, list) else [value] for value in (a, b))
    common = [kind for kind in first if kind in second]
    if "integer" not in common and "integer" in [*first, *second] and "number" in [*first, *second]:
        common.append("integer")
    if not common:
        raise ContradictionError
    return common[0] if len(common) == 1 else common


def _values_of_type(values: list[Any], kind: Any) -> list[Any]:
    kinds = kind if isinstance(kind, list) else [kind]
    kept = [value for value in values if any(is_of_type(value, kind) for kind in kinds)]
    if not kept:
        raise ContradictionError
    return kept


def is_of_type(value: Any, kind: Any) -> bool:
    """Whether a value of JSON has a type of schemas."""
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float):
        return kind == "number" or (kind == "integer" and value.is_integer())
    return kind in TYPE_NAMES[type(value)]


def _common_values(a: list[Any], b: list[Any]) -> list[Any]:
    """Values of a that are in b too."""
    texts = {json.dumps(value, sort_keys=True) for value in b}
    common = [value for value in a if json.dumps(value, sort_keys=True) in texts]
    if not common:
        raise ContradictionError
    return common
