"""Objects with a limited number of properties."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from ikpy.engine.grammars.gbnf import GrammarError
from ikpy.engine.grammars.grammar import json_schema_grammar
from tests.cpu.vocab.test_grammar import TEXTS, accepts

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
        ({"minProperties": 10_001}, "more than 10000 properties"),
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


EMPTY = {"enum": []}
LOOP = {"properties": {"bad": {"const": 1, "type": "string"}, "up": {"$ref": "#/$defs/loop"}}, "required": ["bad"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": EMPTY, "b": {"const": 1}}}, ["{}", '{"b":1}'], ['{"a":1}', '{"a":}']),
        ({"properties": {"a": {"minimum": 5, "maximum": 3}}}, ["{}"], ['{"a":4}']),
        ({"properties": {"a": {"type": ["string", "null"], "enum": [1]}}}, ["{}"], ['{"a":1}']),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}}, ["{}"], ['{"a":null}']),
        ({"properties": {"a": {"minLength": 3, "maxLength": 2}}}, ["{}"], ['{"a":"abc"}', '{"a":"ab"}']),
        ({"properties": {"a": {"type": "array", "minItems": 1, "items": EMPTY}}}, ["{}"], ['{"a":[1]}', '{"a":[]}']),
        ({"properties": {"a": {"properties": {"b": EMPTY}, "required": ["b"]}}}, ["{}"], ['{"a":{}}']),
        ({"properties": {"a": EMPTY}, "additionalProperties": {"const": 1}}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"additionalProperties": EMPTY}, ["{}"], ['{"a":1}']),
        ({"patternProperties": {"^a": EMPTY, "^b": {"const": 1}}}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"type": "array", "items": EMPTY}, ["[]"], ["[1]", "[[]]"]),
        ({"prefixItems": [{"const": 1}, EMPTY], "items": {"const": 2}, "minItems": 0}, ["[]", "[1]"], ["[1,2]"]),
        ({"anyOf": [EMPTY, {"const": 2}]}, ["2"], ["1"]),
        ({"properties": {"a": {"$ref": "#/$defs/loop"}}, "$defs": {"loop": LOOP}}, ["{}"], ['{"a":{"bad":1}}']),
        (
            {
                "properties": {"x": {"$ref": "#/$defs/loop"}, "y": {"$ref": "#/$defs/way"}},
                "$defs": {
                    "way": {"properties": {"loop": {"$ref": "#/$defs/loop"}}},
                    "loop": {"properties": {"way": {"$ref": "#/$defs/way"}, "no": EMPTY}, "required": ["no"]},
                },
            },
            ["{}", '{"y":{}}'],
            ['{"x":{}}', '{"y":{"loop":}}', '{"y":{"loop":{}}}'],
        ),
    ],
)
def test_what_no_value_fits_is_left_out(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = json_schema_grammar(schema, TEXTS)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": EMPTY}, "required": ["a"]}, "root-a: no value is allowed"),
        ({"type": "array", "items": EMPTY, "minItems": 1}, "no array has 1 or more and 0 or fewer items"),
        ({"$ref": "#/$defs/loop", "$defs": {"loop": LOOP}}, "loop-bad: no value is allowed"),
        ({"not": {}}, "root: no value is allowed"),
        ({"minLength": 2, "maxLength": 1}, "no text has 2 or more and 1 or fewer characters"),
    ],
)
def test_what_must_be_there_and_cannot_is_an_error(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        json_schema_grammar(schema, TEXTS)
