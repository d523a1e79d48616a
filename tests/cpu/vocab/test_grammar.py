"""GBNF and JSON schema grammars over tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikpy.engine.grammars import gbnf
from ikpy.engine.grammars.digit_ranges import integer_range
from ikpy.engine.grammars.gbnf import (
    GrammarError,
    Literal,
    Node,
    Ref,
    Rules,
    _Parser,
    children,
    parse_gbnf,
)
from ikpy.engine.grammars.gbnf_lark import to_lark
from ikpy.engine.grammars.grammar import (
    TokenTexts,
    gbnf_grammar,
    json_schema_grammar,
    lark_grammar,
    make_grammar,
    regex_grammar,
)
from ikpy.engine.grammars.json_schema import schema_to_gbnf
from ikpy.engine.grammars.operators import Group, Repeat

PIECES = [bytes([i]) for i in range(256)] + [b"yes", b"no", b"ab", b" yes", "é".encode(), b'": "']
BEGIN, END = len(PIECES), len(PIECES) + 1
TEXTS = TokenTexts(
    [*PIECES, b"<begin>", b"<end>"],
    special=[BEGIN, END],
    eog=[END],
    tokenize=lambda name: [BEGIN] if name == "<begin>" else list(name.encode()),
)


def accepts(grammar, text: str | bytes) -> bool:
    """Whether the whole text is a sentence of the grammar; checks the mask against every step."""
    grammar.reset()
    for byte in text.encode() if isinstance(text, str) else text:
        if not grammar.allows(byte):
            return False
        grammar.accept(byte)
    return grammar.allows(END)


@pytest.mark.parametrize(("source", "good", "bad"), [
    ('root ::= " " ("yes" | "no") "."', [" yes.", " no."], ["yes.", " yes", " maybe.", " yes.."]),
    ('root ::= [a-c]* "end"', ["end", "abcend", "aend"], ["abc", "endd", "dend"]),
    ('root ::= ("a" | "ab") "c"', ["ac", "abc"], ["a", "abbc"]),
    ('root ::= [^~]*', ["", "ab\nc", "é"], ["~", "a~"]),
    ('root ::= "a"{2,3} "b"{1,} "c"{2}', ["aabcc", "aaabbbcc"], ["abcc", "aaaabcc", "aabc"]),
    ('root ::= item+\nitem ::= "- " [^\\n]+ "\\n" # one line\n', ["- a\n", "- a\n- b c\n"], ["- a", "-a\n"]),
    ('root ::= (\n  "x"\n  | "y"  # comment\n) tail\ntail ::=\n "1" |\n "2"', ["x1", "y2"], ["x", "z1"]),
    ('root ::= "\\x41\\u00e9\\U0001F600\\"\\\\"', ['Aé😀"\\'], ["A"]),
    ("root ::= [\\]\\[a^-]", ["]", "[", "^", "-"], ["b", "\\"]),
    ('root ::= . . ', ["aé", "\n\n"], ["a", "abc"]),
    ('root ::= "(" root ")" | "x"', ["x", "(x)", "(((x)))"], ["(x", "x)", "()"]),
    ('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"', ["1", "12+(3+4)"], ["+", "1+", "(1"]),
    ('root ::= "a" root? "b" | ', ["", "ab", "aabb"], ["a", "aab", "ba"]),
])  # fmt: skip
def test_sentences(source: str, good: list[str], bad: list[str]) -> None:
    grammar = gbnf_grammar(source, TEXTS)
    for text in good:
        assert accepts(grammar, text), f"{source} must accept {text!r}"
    for text in bad:
        assert not accepts(grammar, text), f"{source} must refuse {text!r}"


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= "a"{0} "b"{0,0} "c" root? | "d"', ["d", "cd", "c"], ["ad", "bc", ""]),
        ('root ::= ("a" | (r ""?) | "x"+) "b" | r\nr ::= [c-e]', ["ab", "cb", "xxb", "d"], ["b", "cc"]),
        ('root ::= ("" | ""{2,}) () ("a" ()){2} ("" ""){3}', ["aa"], ["", "a"]),
    ],
)
def test_parts_that_are_always_empty(source: str, good: list[str], bad: list[str]) -> None:
    grammar = gbnf_grammar(source, TEXTS)
    assert all(accepts(grammar, text) for text in good) and not any(accepts(grammar, text) for text in bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "maxItems": 1}, ["[]", '[{"a": [1]}]'], ["[1, 2]"]),
        ({"properties": {"a": {"type": "string", "maxLength": 0}, "b": {}}}, ['{"a": ""}'], ['{"a": "x"}']),
        (
            {"properties": {"a": {}}, "additionalProperties": True, "maxProperties": 1},
            ['{"x": [1]}'],
            ['{"a": 1, "x": 2}'],
        ),
    ],
)
def test_limits_of_none_further_beside_any_value(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = json_schema_grammar(schema, TEXTS)
    assert all(accepts(grammar, text) for text in good) and not any(accepts(grammar, text) for text in bad)


def test_recursive_rules_keep_their_meaning_without_a_regular_expression() -> None:
    """The same language with and without recursion, on random texts; a greedy lexer would differ."""
    regular = gbnf_grammar('root ::= ("a" | "ab" | "b"+ "c")* ("end" | [a-e]{2})', TEXTS)
    rules = (
        'root ::= part | final\npart ::= ("a" | "ab" | bs "c") root\nbs ::= "b" bs | "b"\nfinal ::= "end" | [a-e]{2}'
    )
    recursive = gbnf_grammar(rules, TEXTS)
    assert "TEXT" not in to_lark(parse_gbnf(rules))
    pattern = re.compile(r"(?:a|ab|b+c)*(?:end|[a-e]{2})")
    draw = random.Random(5)
    seen = 0
    for _ in range(400):
        text = "".join(draw.choice("abcden") for _ in range(draw.randint(1, 6)))
        wanted = bool(pattern.fullmatch(text))
        seen += wanted
        assert accepts(regular, text) == wanted == accepts(recursive, text), text
    assert seen > 20


def test_mask_has_every_allowed_token_and_no_other() -> None:
    for source in ('root ::= "yes" | "yes sir" | "no"', 'root ::= "y" root | "yes" | "no" '):
        grammar = gbnf_grammar(source, TEXTS)
        first = {PIECES[i] for i in np.flatnonzero(grammar.mask())}
        assert first == {b"y", b"yes", b"n", b"no"}
        grammar.accept(PIECES.index(b"yes"))
        mask = grammar.mask()
        assert mask[END] and not mask[BEGIN]
        assert all(mask[i] == grammar.allows(i) for i in range(len(mask)))
        grammar.accept(END)
        assert not grammar.mask().any()
        with pytest.raises(GrammarError, match="empty grammar stack"):
            grammar.accept(ord("y"))


def test_characters_split_over_tokens() -> None:
    grammar = gbnf_grammar("root ::= [é-ü]+", TEXTS)
    grammar.accept(0xC3)
    assert not grammar.complete and not grammar.allows(0xC3) and not grammar.allows(END)
    grammar.accept(0xA9)
    assert grammar.complete
    assert accepts(grammar, "éü") and not accepts(grammar, "éa")


def test_explicit_tokens() -> None:
    grammar = gbnf_grammar('root ::= <begin> "a" | <[97]> "b"', TEXTS)
    assert set(np.flatnonzero(grammar.mask())) == {BEGIN, 97}
    grammar.accept(BEGIN)
    grammar.accept(97)
    assert grammar.complete
    assert not gbnf_grammar('root ::= "<" [a-z]+ ">"', TEXTS).allows(BEGIN)
    with pytest.raises(GrammarError, match=r"no token 99999|cannot be used"):
        gbnf_grammar("root ::= <[99999]>", TEXTS)


@pytest.mark.parametrize(("source", "message"), [
    ('root ::= ("yes"', r"error parsing grammar: expecting '\)' at"),
    ('foo ::= "x"', "does not contain a 'root' symbol"),
    ("root ::= other", "undefined rule 'other'"),
    ('root ::= root "a" | "b"', "left recursion in rule 'root'"),
    ('root ::= a\na ::= "x"? root "b"', "left recursion"),
    ("root = 1", "expecting ::= at = 1"),
    ('root ::= "abc', "unexpected end of input"),
    ('root ::= "\\q"', "unknown escape at"),
    ('root ::= "a"{3,2}', "limits out of order"),
    ('root ::= "a"{10001}', "exceeds 10000"),
    ('root ::= [z-a]', "out of order"),
    ('root ::= "a" )', "expecting newline or end at"),
    ('root ::= "\\x1"', "expecting 2 hex chars"),
    ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ('root ::= "a"{' + "9" * 5000 + "}", "expecting {m}"),
    ('root ::= "\ud800"', "lone surrogate at character 11"),
])  # fmt: skip
def test_errors_name_the_place(source: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        gbnf_grammar(source, TEXTS)


def test_upper_limits_that_no_answer_is_held_to() -> None:
    """Repetitions are counted up to 10,000; a larger limit is none, as a request may well name one."""
    for count in ("{2,10001}", "{2,999999999}", "{2,2147483647}", "{2,18446744073709551616}"):
        grammar = gbnf_grammar(f'root ::= "a"{count}', TEXTS)
        assert accepts(grammar, "a" * 40) and not accepts(grammar, "a")
    grammar = gbnf_grammar('root ::= "a"{2,10000}', TEXTS)
    assert accepts(grammar, "a" * 10000) and not accepts(grammar, "a" * 10001)
    for schema, value in (
        ({"type": "string", "minLength": 2, "maxLength": 2**31}, "ab"),
        ({"type": "string", "maxLength": 5000}, "a" * 5000),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 100_000}, [1, 2, 3]),
        ({"type": "object", "additionalProperties": {}, "maxProperties": 100_000}, {"a": 1, "b": 2}),
    ):
        grammar = json_schema_grammar(schema, TEXTS)
        assert accepts(grammar, json.dumps(value)), schema
    assert not accepts(json_schema_grammar({"type": "string", "maxLength": 5000}, TEXTS), f'"{"a" * 5001}"')


PARTS = ["a", "b", "c", "d", '"x"', '""', '"x"?', "a*", "b?", "(c | d)", '(a "x")', "d+", "b{2}", "()", '("" | a)']
BODIES = st.lists(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map(" ".join), min_size=1, max_size=2).map(
    " | ".join
)


def naive_left_recursion(rules: Rules) -> bool:
    """By the definition: all rules that may stand first, of all rules, until nothing changes."""
    empty: set[str] = set()
    first: dict[str, set[str]] = {name: set() for name in rules}

    def look(node: Node) -> tuple[set[str], bool]:
        if isinstance(node, Ref):
            return {node.name} | first[node.name], node.name in empty
        parts = [look(part) for part in children(node)]
        if isinstance(node, Group):
            n = next((i for i, part in enumerate(parts) if not part[1]), len(parts))
            return set().union(*(part[0] for part in parts[: n + 1])), n == len(parts)
        names = set().union(*(part[0] for part in parts))
        if isinstance(node, Repeat):
            return names, node.low == 0 or parts[0][1]
        return names, isinstance(node, Literal) and not node.text if not parts else any(part[1] for part in parts)

    for _ in range(4 * len(rules)):
        for name, node in rules.items():
            first[name], may_be_empty = look(node)
            empty |= {name} if may_be_empty else set()
    return any(name in first[name] for name in rules)


@settings(max_examples=300, deadline=None)
@given(st.lists(BODIES, min_size=5, max_size=5))
def test_left_recursion_is_found_as_by_its_definition(bodies: list[str]) -> None:
    source = "\n".join(f"{name} ::= {body}" for name, body in zip(["root", *"abcd"], bodies, strict=True))
    recursive = naive_left_recursion(_Parser(source).rules())
    try:
        parse_gbnf(source)
    except GrammarError as error:
        assert recursive, error
        assert "left recursion in rule" in str(error)
    else:
        assert not recursive


def test_long_chains_of_rules_are_checked_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = 0

    def counted(node: Node) -> Sequence[Node]:
        nonlocal visits
        visits += 1
        return children(node)

    monkeypatch.setattr(gbnf, "children", counted)
    for last, error in (('"x"', None), ("r0", "left recursion in rule 'r0'")):
        chain = "\n".join(f"r{i} ::= r{i + 1}?" for i in range(3000)) + f"\nr3000 ::= {last}\nroot ::= r0"
        visits = 0
        if error:
            with pytest.raises(GrammarError, match=error):
                parse_gbnf(chain)
        else:
            assert len(parse_gbnf(chain)) == 3002
        assert visits < 4 * 6002, "nodes of the grammar"


def test_large_alternatives_become_rules_not_an_exploding_expression() -> None:
    lines = ["root ::= r0 r0"] + [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(14)] + ['r14 ::= "a"']
    lark = to_lark(parse_gbnf("\n".join(lines)))
    assert "TEXT" not in lark and len(lark) < 1000
    many = "root ::= " + " | ".join(f'"word{i}"' for i in range(3000))
    assert accepts(gbnf_grammar(many, TEXTS), "word2999")


SCHEMAS: list[tuple[object, list[str], list[str]]] = [
    ({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
      "required": ["a", "b"], "additionalProperties": False},
     ['{"a": true, "b": "x"}', '{\n"a": false, "b"\n\n : "y"\n\n                    }\n\n             '],
     ['{"a": true}', '{"b": "x", "a": true}', '{"a": true, "b": "z"}', '{"a":\n\n\ntrue,"b":"x"}']),
    ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
      "required": ["b"]},
     ['{"b":null}', '{"a":null,"b":null}', '{"b":null,"c":null}', '{"a":null,"b":null,"c":null}'],
     ["{}", '{"a":null}', '{"b":null,"a":null}', '{"b":null,"d":null}', '{"b":null,}']),
    ({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
     ["{}", '{"a":1}', '{"a":1,"z":"q"}', '{"z":"q","y":""}'], ['{"z":1}']),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
     ["[1]", "[1, 2,3]"], ["[]", "[1,2,3,4]", "[true]"]),
    ({"prefixItems": [{"type": "string"}, {"type": "number"}]}, ['["a", -1.5e3]'], ['["a"]', '[1,"a"]']),
    ({"type": ["string", "null"]}, ['"x\\n\\u00e9"', "null", '"é"'], ["1", '"\n"', '"\\x"']),
    ({"type": "integer", "minimum": -5, "exclusiveMaximum": 12}, ["-5", "0", "11"], ["-6", "12", "05", "1.0"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"a\\n"', '"abc"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^[A-Z]{2}-\\d+(?:x|\\.\\\\)?$"},
     ['"AB-1"', '"AB-12x"', '"AB-1.\\\\"'], ['"A-1"', '"AB-"', '"AB-1."']),
    ({"type": "string", "format": "date-time"}, ['"2026-01-31T23:59:59Z"'], ['"2026-13-01T00:00:00Z"']),
    ({"format": "uuid4"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123"']),
    ({"anyOf": [{"const": {"k": [1, "é"]}}, {"type": "boolean"}]}, ['{"k":[1,"é"]}', "true"], ['{"k":[1]}']),
    ({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
        "v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["v", "next"]}}},
     ['{"v":1,"next":null}', '{"v":1,"next":{"v":2,"next":null}}'], ['{"v":1,"next":{}}', '{"v":1}']),
    ({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "integer"}}}]}, ['{"a":1}', '{"a":1,"b":2}'], ['{"b":2}']),
    ({}, ['{"a": [1, {"b": null}], "c": "d"}', "[]", "3.25"], ["{a:1}", "[1,]", "tru"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS)
def test_json_schema(schema: object, good: list[str], bad: list[str]) -> None:
    grammar = json_schema_grammar(json.dumps(schema), TEXTS)
    for text in good:
        assert accepts(grammar, text), f"{schema} must accept {text!r}\n{schema_to_gbnf(schema)}"
        json.loads(text)
    for text in bad:
        assert not accepts(grammar, text), f"{schema} must refuse {text!r}\n{schema_to_gbnf(schema)}"


def test_json_schema_errors() -> None:
    with pytest.raises(GrammarError, match=r"JSON schema conversion failed: root: cannot resolve \$ref"):
        json_schema_grammar({"$ref": "https://example.com/x"}, TEXTS)
    with pytest.raises(GrammarError, match=r"unknown type .*; .*look-around"):
        json_schema_grammar(
            {"type": "object", "properties": {"a": {"type": "set"}, "b": {"type": "string", "pattern": "(?=x)"}}},
            TEXTS,
        )
    with pytest.raises(GrammarError, match="not valid JSON"):
        json_schema_grammar("{", TEXTS)
    with pytest.raises(GrammarError, match=r"nested too deeply|unsupported schema"):
        json_schema_grammar("[" * 5000 + "]" * 5000, TEXTS)
    with pytest.raises(GrammarError, match="but not both"):
        make_grammar('root ::= "a"', "{}", TEXTS)
    assert make_grammar("", None, TEXTS) is None


@pytest.mark.parametrize(("schema", "message"), [
    ({"type": "integer", "minimum": 2, "maximum": 1}, "root: empty integer range 2 to 1"),
    ({"type": "integer", "exclusiveMinimum": True}, "root: exclusiveMinimum must be a number"),
    ({"type": "array", "minItems": -1}, "root: minItems must be a whole number from 0"),
    ({"type": "string", "maxLength": 1.5}, "root: maxLength must be a whole number from 0"),
    ({"type": "string", "maxLength": float("inf")}, "not valid JSON: Infinity is not a JSON value"),
    ({"enum": [float("nan")]}, "not valid JSON: NaN is not a JSON value"),
    ({"properties": []}, "root: properties must be an object"),
    ({"required": [1]}, "root: required must be a list of names"),
    ({"type": "string", "pattern": 5}, "root: pattern must be a string"),
    ({"items": {"anyOf": {}}}, "root-item: anyOf must be a list"),
    ({"allOf": [{"enum": -1}, {"properties": {"a": {}}}]}, "root: enum must be a list"),
    ({"allOf": [{"$ref": "#"}]}, "left recursion"),
    ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "nested too deeply"),
    ({"enum": []}, "root: no value is allowed"),
    ({"allOf": [{"enum": [1]}, {"enum": [2]}]}, "root: no value is allowed"),
    ({"anyOf": [{}], "$ref": "#/anyOf/²"}, "points nowhere"),
])  # fmt: skip
def test_malformed_json_schemas(schema: dict, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        json_schema_grammar(schema, TEXTS)


def test_fractional_limits_of_integers() -> None:
    grammar = json_schema_grammar({"type": "integer", "minimum": 1.5, "exclusiveMaximum": 3.5}, TEXTS)
    assert [n for n in range(6) if accepts(grammar, str(n))] == [2, 3]


def test_long_chains_of_rules() -> None:
    chain = "".join(f"r{i} ::= r{i + 1}\n" for i in range(1200))
    assert accepts(gbnf_grammar(f'{chain}r1200 ::= "a"\nroot ::= r0', TEXTS), "a")


def test_checks_of_many_rules_grow_with_their_number() -> None:
    n = 8000  # minutes, if every rule were compared with all others
    forward = "".join(f"r{i} ::= r{i + 1}\n" for i in range(n))
    backward = "root ::= " + " ".join(f"r{n - i}" for i in range(n)) + "\n"
    for end in ('"a"', '""'):
        assert len(parse_gbnf(f"root ::= r0\n{forward}r{n} ::= {end}")) == n + 2
        assert len(parse_gbnf(f"{backward}{forward}r{n} ::= {end}")) == n + 2
    with pytest.raises(GrammarError, match=rf"left recursion in rule 'r{n - 1}'"):
        parse_gbnf(f'root ::= r0\n{forward}r{n} ::= r{n - 1} | "a"')
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}
    assert len(parse_gbnf(schema_to_gbnf(schema))) > 9000


@pytest.mark.parametrize("depth", [100, 200, 300, 10_000])
def test_deep_nesting_is_an_error_of_the_grammar(depth: int) -> None:
    with pytest.raises(GrammarError, match="nested"):
        gbnf_grammar("root ::= " + '("a" | "b" root ' * depth + '"c"' + ")" * depth, TEXTS)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 99), (7, 7), (3, 1234), (-15, 27), (-120, -8), (95, 10005)])
def test_integer_ranges_are_exact(low: int, high: int) -> None:
    pattern = re.compile(integer_range(low, high).replace('"', "").replace(" ", ""))
    found = {n for n in range(-2000, 11000) if pattern.fullmatch(str(n))}
    assert found == set(range(low, high + 1))
    assert not pattern.fullmatch("00") and not pattern.fullmatch("01")


def test_half_open_integer_ranges() -> None:
    above = re.compile(integer_range(37, None).replace('"', "").replace(" ", ""))
    assert {n for n in range(2000) if above.fullmatch(str(n))} == set(range(37, 2000))
    below = re.compile(integer_range(None, 12).replace('"', "").replace(" ", ""))
    assert {n for n in range(-300, 300) if below.fullmatch(str(n))} == set(range(-300, 13))


def test_regular_expressions_and_lark() -> None:
    assert accepts(regex_grammar("a+/[0-9]{2}", TEXTS), "aaa/12")
    assert not accepts(regex_grammar("a+", TEXTS), "ab")
    assert accepts(make_grammar("", None, TEXTS, regex="x|y"), "y")
    assert accepts(lark_grammar('start: "a" /[bc]+/', TEXTS), "abcb")
    assert accepts(make_grammar('%llguidance {}\nstart: "abc"', None, TEXTS), "abc")
    for make in (lambda: regex_grammar("(", TEXTS), lambda: lark_grammar("start: (", TEXTS)):
        with pytest.raises(GrammarError):
            make()
    with pytest.raises(GrammarError, match="at most"):
        gbnf_grammar("#" * 2_000_000, TEXTS)


def test_compiled_grammars_are_kept_and_independent() -> None:
    source = 'root ::= "ab" [0-9]* "kept"'
    first = gbnf_grammar(source, TEXTS)
    began = len(TEXTS._compiled)
    first.accept(ord("a"))
    second = gbnf_grammar(source, TEXTS)
    assert len(TEXTS._compiled) == began
    assert first.allows(ord("b")) and not second.allows(ord("b")) and second.allows(ord("a"))
    branch = first.copy()
    branch.accept(ord("b"))
    assert branch.allows(ord("1")) and not first.allows(ord("1"))


def test_masks_computed_ahead_are_those_of_the_moment() -> None:
    ahead, fresh = (gbnf_grammar("root ::= ([a-f] [0-9])+", TEXTS) for _ in range(2))
    for char in "a1b2c3d4e5f6a7":
        wanted = {ord(c) for c in ("abcdef" if char.isalpha() else "0123456789")}
        mask = ahead.mask()
        assert {i for i in range(128) if mask[i]} == wanted
        assert all(ahead.allows(i) == fresh.allows(i) for i in range(128))
        ahead.accept(ord(char))
        fresh.accept(ord(char))
        assert ahead._ahead is not None and fresh._ahead is None
    assert ahead.complete
