"""Objects with a limited number of properties."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from ikpy.engine.gbnf import GrammarError
from ikpy.engine.grammar import json_schema_grammar
from tests.cpu.test_grammar import TEXTS, accepts

NAMED = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}}
OPEN = {"additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"]])
@pytest.mark.parametrize("more", [{}, OPEN], ids=["closed", "open"])
@pytest.mark.parametrize(("low", "high"), [*itertools.product((None, 0, 1, 2, 4), (None, 0, 1, 2, 3, 4))])
def test_objects_with_so_many_properties(
    low: int | None, high: int | None, more: dict[str, Any], required: list[str]
) -> None:
    limits = {name: n for name, n in (("minProperties", low), ("maxProperties", high)) if n is not None}
    schema = {"type": "object", **NAMED, **more, "required": required, **limits}
    objects = [
        dict.fromkeys([*names, *others], 1)
        for n in range(4)
        for names in itertools.combinations("abc", n)
        for others in ([], ["x"], ["x", "y"])
    ]
    wanted = [
        shown
        for shown in objects
        if set(required) <= set(shown)
        and (more or not set(shown) & {"x", "y"})
        and (low or 0) <= len(shown) <= (9 if high is None else high)
    ]
    try:
        grammar = json_schema_grammar(schema, TEXTS)
    except GrammarError as error:
        assert "no object has so many properties" in str(error) and not wanted
        return
    wrong = [shown for shown in objects if accepts(grammar, json.dumps(shown)) != (shown in wanted)]
    assert not wrong, wrong


def test_maps_with_so_many_entries() -> None:
    grammar = json_schema_grammar({"minProperties": 1, "maxProperties": 2}, TEXTS)
    assert accepts(grammar, '{"x": 1}') and accepts(grammar, '{"x": [], "y": {}}')
    assert not accepts(grammar, "{}") and not accepts(grammar, '{"x": 1, "y": 1, "z": 1}')
    joined = {"allOf": [{"type": "object", "minProperties": 1}, {"minProperties": 2, **OPEN}]}
    grammar = json_schema_grammar(joined, TEXTS)
    assert accepts(grammar, '{"x": 1, "y": 2}') and not accepts(grammar, '{"x": 1}')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"minProperties": 2001}, "more than 2000 properties"),
        ({"minProperties": "2"}, "must be a whole number"),
        ({"minProperties": 1900, "properties": dict.fromkeys("abcdefg", True), **OPEN}, "too many properties"),
    ],
)
def test_numbers_that_are_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        json_schema_grammar({"type": "object", **schema}, TEXTS)


def test_required_properties_without_a_schema_follow_that_of_further_ones() -> None:
    schema = {"required": ["a", "b"], "properties": {"b": {"type": "boolean"}}, **OPEN}
    grammar = json_schema_grammar(schema, TEXTS)
    assert accepts(grammar, '{"b":true,"a":1}') and accepts(grammar, '{"b":true,"a":1,"c":2}')
    assert not accepts(grammar, '{"b":true,"a":"x"}') and not accepts(grammar, '{"b":1,"a":1}')
    matched = json_schema_grammar(schema | {"patternProperties": {"^a": {"type": "string"}}}, TEXTS)
    assert accepts(matched, '{"b":true,"a":"x"}') and not accepts(matched, '{"b":true,"a":1}')
