"""JSON schema grammars: what must hold together, further properties, lists and patterns."""

from __future__ import annotations

import json

import pytest

from ikpy.engine.grammars.gbnf import GrammarError
from ikpy.engine.grammars.grammar import json_schema_grammar
from ikpy.engine.grammars.json_schema import schema_to_gbnf
from ikpy.engine.grammars.schema_names import LONGEST_PREFIXES, MOST_PREFIXES, other_names
from tests.cpu.vocab.test_grammar import TEXTS, accepts

DEFINITIONS = {
    "Color": {"type": "string", "enum": ["r", "g"]},
    "Small": {"type": "integer", "maximum": 3},
    "Named": {"properties": {"name": {"type": "string"}}, "required": ["name"]},
    "Again": {"$ref": "#/$defs/Named"},
    "a b": {"type": "null"},
    "Tree": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]},
}
TOGETHER: list[tuple[dict, list[str], list[str]]] = [
    ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "r"}, ['"r"'], ['"b"', "{}"]),
    ({"allOf": [{"$ref": "#/$defs/Again"}]}, ['{"name":"x"}'], ["{}"]),
    ({"allOf": [{"$ref": "#/$defs/Again"}, {"properties": {"n": {"type": "null"}}}]},
     ['{"name":"x"}', '{"name":"x","n":null}'], ['{"n":null}', "{}"]),
    ({"allOf": [{"type": "string"}, {"minLength": 2}, {"maxLength": 3}]}, ['"ab"', '"abc"'], ['"a"', '"abcd"', "{}"]),
    ({"allOf": [{"$ref": "#/$defs/Small"}, {"minimum": 2}]}, ["2", "3"], ["1", "4"]),
    ({"$ref": "#/$defs/Small", "minimum": 2, "description": "two or three"}, ["2", "3"], ["1", "4"]),
    ({"allOf": [{"type": ["string", "number"]}, {"type": ["integer", "null"]}]}, ["1"], ["1.5", "null", '"a"']),
    ({"allOf": [{"enum": [1, "a", None]}, {"type": ["string", "null"]}]}, ['"a"', "null"], ["1"]),
    ({"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "string"}]}, ['"a"'], ["null"]),
    ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"minimum": 5}}, "required": ["a"]}]},
     ['{"a":5}'], ['{"a":4}', "{}"]),
    ({"type": "object", "properties": {"t": {"const": "x"}}, "anyOf": [{"required": ["t"]}]},
     ['{"t":"x"}'], ['{"t":1}', "{}"]),
    ({"properties": {"k": {"const": 1}}, "required": ["k"],
      "oneOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]},
                {"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
     ['{"k":1,"a":null}', '{"k":1,"b":null}'], ['{"k":1}', '{"a":null}']),
    ({"allOf": [{"$ref": "#/$defs/Tree"}, {"type": "array"}]}, ["[]", "[1,[2]]"], ["1"]),
    ({"allOf": [{}, True, {"title": "anything"}]}, ["1", "{}"], ["x"]),
    ({"$ref": "#/$defs/a%20b"}, ["null"], ["1"]),
]  # fmt: skip
OTHERS: list[tuple[dict, list[str], list[str]]] = [
    ({"properties": {"a": {"type": "integer"}, "abc\n": False}, "additionalProperties": True},
     ['{"a":1}', '{"ab":"x"}', '{"":1}', '{"b":[]}', '{"a":1,"abc":2}', '{"abc\\t":1}'],
     ['{"a":"x"}', '{"a":1,"a":"x"}', '{"abc\\n":1}', '{"\\u0061":"x"}', '{"abc\\u000a":1}']),
    ({"properties": {"": {"type": "null"}, "é]^-\"\\": {"type": "null"}}, "additionalProperties": {"type": "string"}},
     ['{"":null}', '{"é]^-\\"\\\\":null,"é":"x"}', '{"^":"x"}'], ['{"":"x"}', '{"é]^-\\"\\\\":"x"}']),
]  # fmt: skip
LISTS: list[tuple[dict, list[str], list[str]]] = [
    ({"prefixItems": [], "items": {"type": "integer"}}, ["[]", "[1]", "[1,2]"], ["[,1]", "[null]"]),
    ({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
     ['["a",1]', '["a",1,2]'], ['["a"]', '["a",1,2,3]', "[]"]),
    ({"prefixItems": [{"type": "string"}, {"type": "null"}], "minItems": 1}, ['["a"]', '["a",null]'], ["[]", "[null]"]),
    ({"prefixItems": [{"type": "string"}, {"type": "null"}], "maxItems": 1}, ['["a"]'], ["[]", '["a",null]']),
    ({"prefixItems": [{"type": "null"}, {"type": "null"}], "minItems": 0}, ["[]", "[null]", "[null,null]"], ["[1]"]),
    ({"items": [{"type": "string"}, {"type": "null"}]}, ['["a",null]'], ['["a"]', '[null,"a"]']),
    ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    ({"type": "array", "items": {"not": {}}}, ["[]"], ["[1]"]),
    ({"allOf": [{"additionalProperties": {"minimum": 3}}, {"properties": {"a": {"type": "integer"}}}]},
     ['{"a":3}'], ['{"a":2}', '{"a":"x"}']),
    ({"anyOf": [{"not": {}}, {"type": "null"}, False]}, ["null"], ["1", "{}"]),
    ({"properties": {"a": {"type": "null"}, "b": {"not": {}}, "c": {"anyOf": [{"not": {}}, {"type": "boolean"}]}}},
     ['{"a":null}', '{"c":true}', "{}"], ['{"b":1}', '{"c":1}']),
    ({"type": "string", "pattern": r"\d{2}"}, ['"12"', '"ab 12 c"'], ['"1"', '"a"', "12"]),
    ({"type": "string", "pattern": r"^a\$"}, ['"a$"', '"a$b"'], ['"ba$"', '"a"']),
    ({"type": "string", "pattern": "b$"}, ['"b"', '"a\\nb"'], ['"ba"']),
]  # fmt: skip
PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r"^[\s]$", ['" "', r'"\t"', r'"\n"'], ['"\t"', '"\n"', '"s"']),
    ("^[\n]$", [r'"\n"'], ['"\n"']),
    (r"^[\"a\\]+$", [r'"\"a\\"'], ['"b"', r'"\n"']),
    (r"^[\x41-C\u00e9]$", ['"A"', '"B"', '"é"'], ['"x"', '"u"', '"D"']),
    (r"^\x41\u00e9$", ['"Aé"'], ['"A"']),
    (r"^[^a]$", ['"b"', r'"\""', r'"\n"', r'"\\"'], ['"a"', '"\n"', r'"\u0061"']),
    (r"^[^\n]$", ['"b"', r'"\t"'], [r'"\n"', '"\n"']),
    (r"^.$", ['"a"', r'"\t"', r'"\""'], [r'"\n"', r'"\u000a"', '"\u2028"']),
    (r"^\S\D\W$", ['"a-+"', r'"\"a\""'], ['" a+"', '"\u3000a+"', r'"\na+"', '"a1+"', '"aab"']),
    (r"^a*?b{2,3}?$", ['"aabb"', '"bbb"'], ['"aab"', '"bbbb"']),
    (r"^a\$$", ['"a$"'], ['"a"']),
    (r"^[a\-]b-c[+--]$", ['"ab-c+"', '"-b-c-"'], ['"ab-c/"']),
]


@pytest.mark.parametrize(("schema", "good", "bad"), [
    *(({**schema, "$defs": DEFINITIONS}, good, bad) for schema, good, bad in TOGETHER),
    *OTHERS,
    *LISTS,
    *(({"type": "string", "pattern": pattern}, good, bad) for pattern, good, bad in PATTERNS),
])  # fmt: skip
def test_texts_of_schemas(schema: dict, good: list[str], bad: list[str]) -> None:
    grammar = json_schema_grammar(json.dumps(schema), TEXTS)
    for text in good:
        json.loads(text)
        assert accepts(grammar, text), f"{schema} must accept {text!r}\n{schema_to_gbnf(schema)}"
    for text in bad:
        assert not accepts(grammar, text), f"{schema} must refuse {text!r}\n{schema_to_gbnf(schema)}"


@pytest.mark.parametrize(("schema", "message"), [
    ({"allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}, "root: pattern .* cannot be joined"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "root: no value is allowed"),
    ({"allOf": [5, {"type": "null"}]}, "root: unsupported schema 5"),
    ({"$ref": "#foo"}, "points nowhere"),
    ({"$ref": "#foo", "type": "null"}, "points nowhere"),
    ({"not": {"type": "string"}}, "root: not is not supported"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "no array has 3 or more and 2 or fewer items"),
    ({"type": "string", "pattern": "^a|b"}, "alternatives of which one is at an end"),
    ({"anyOf": [{"not": {}}, False]}, "root: no alternatives"),
    ({"type": "string", "pattern": r"^a\b$"}, r"escape \\b is not supported"),
    ({"type": "string", "pattern": r"^[\D]$"}, r"escape \\D is not supported"),
    ({"type": "string", "pattern": r"^\ud83d$"}, r"escape \\u without the number of a character"),
    ({"type": "string", "pattern": "^[z-a]$"}, "range out of order"),
    ({"type": "string", "pattern": "^a++$"}, "possessive"),
])  # fmt: skip
def test_schemas_that_are_refused(schema: dict, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        json_schema_grammar(schema, TEXTS)


def test_names_of_further_properties_stay_bounded() -> None:
    for names in ([f"property number {i}" for i in range(5000)], ["x" * 3000, "x" * 40]):
        rules: list[str] = []
        other_names(names, lambda body, rules=rules: rules.append(body) or "r")
        assert len(rules) <= 2 * (MOST_PREFIXES + 1)
    schema = {"properties": {"x" * 40: {"type": "null"}}, "additionalProperties": {"type": "string"}}
    grammar = json_schema_grammar(schema, TEXTS)
    longest = LONGEST_PREFIXES[0]
    assert accepts(grammar, json.dumps({"x" * (longest - 1): "a"}))
    assert not accepts(grammar, json.dumps({"x" * 40: "a"}))
