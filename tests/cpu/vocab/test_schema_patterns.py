"""Properties whose schema follows from a pattern of their name."""

from __future__ import annotations

from typing import Any

import pytest

from ikpy.engine.grammars.gbnf import GrammarError
from ikpy.engine.grammars.grammar import json_schema_grammar
from tests.cpu.vocab.test_grammar import TEXTS, accepts

INT, TEXT, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"patternProperties": {"^[a-z]+$": INT}}, ["{}", '{"a":1,"bc":2}'], ['{"A":1}', '{"a":"x"}', '{"a1":1}']),
    ({"patternProperties": {"^S_": TEXT, "^I_": INT}, "additionalProperties": False},
     ['{"S_a":"x","I_b":1}', '{"I_":1}', "{}"], ['{"S_a":1}', '{"I_b":"x"}', '{"x":1}']),
    ({"patternProperties": {"_id$": INT}}, ['{"user_id":1}', '{"_id":1}'], ['{"user":1}', '{"user_id":"x"}']),
    # named properties come first, and fit the patterns found in their names
    ({"properties": {"a": {"minimum": 2}}, "patternProperties": {"^a$": INT}},
     ['{"a":2}', "{}"], ['{"a":1}', '{"a":"x"}']),
    ({"properties": {"n": NULL}, "patternProperties": {"^x": INT}, "required": ["n"]},
     ['{"n":null}', '{"n":null,"x1":1}'], ['{"x1":1}', '{"n":null,"n":null}', '{"n":null,"y":1}']),
    ({"required": ["x1"], "patternProperties": {"^x": INT}}, ['{"x1":1}'], ['{"x1":"a"}', "{}", '{"x1":1,"x1":"a"}']),
    ({"properties": {"xa": True, "b": NULL}, "patternProperties": {"^x": False}}, ['{"b":null}', "{}"], ['{"xa":1}']),
    # what may fit two patterns is not offered, nor what cannot be read
    ({"properties": {"n": NULL}, "patternProperties": {"^a": INT, "b$": TEXT}}, ['{"n":null}', "{}"], ['{"ab":1}']),
    ({"properties": {"n": NULL}, "patternProperties": {"^(?=a)": INT}}, ['{"n":null}'], ['{"a":1}']),
    # patterns that ask for nothing, beside names that may be any
    ({"patternProperties": {"^x": {}}, "additionalProperties": True}, ['{"y":1,"x":2}'], ["1"]),
    ({"patternProperties": {"^x": {}}, "additionalProperties": False}, ['{"x":[]}', "{}"], ['{"y":1}']),
    ({"patternProperties": {"^x": INT}, "minProperties": 2}, ['{"x1":1,"x2":2}'], ['{"x1":1}', '{"x1":1,"y":2}']),
    ({"allOf": [{"patternProperties": {"^x": INT}}, {"patternProperties": {"^x": {"minimum": 3}}}]},
     ['{"x":3}'], ['{"x":2}', '{"x":"a"}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_properties_by_pattern(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = json_schema_grammar({"type": "object", **schema}, TEXTS)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []
    implied = json_schema_grammar(schema, TEXTS)
    assert [text for text in good if not accepts(implied, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"patternProperties": {"^(?=a)": INT}}, "cannot be held to"),
        ({"patternProperties": {"^a": INT, "b$": TEXT}}, "cannot be held to"),
        ({"patternProperties": ["^a"]}, "must be an object"),
        ({"patternProperties": {f"^{i}_": INT for i in range(2000)}}, "more than 50000 schemas"),
    ],
)
def test_patterns_that_are_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        json_schema_grammar({"type": "object", **schema}, TEXTS)
