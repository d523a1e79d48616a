"""Calls of Gemma 4, and the tags around Hunyuan's answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ikpy.server.chat.gemma_calls import GEMMA, gemma_calls
from ikpy.server.chat.output import OutputFormat
from ikpy.server.chat.streamed_lists import TOOL_CALLS
from ikpy.server.chat.tagged_values import GLM
from ikpy.server.chat.tags import answer_tags, reasoning_tags
from ikpy.server.chat.tool_formats import tool_format
from ikpy.server.chat.tool_reading import ToolFormat
from ikpy.server.errors import ApiError
from tests.server.test_output import read
from tests.server.test_tagged_values import accepts, call_grammar

Q = '<|"|>'
VALUES: list[tuple[str, Any]] = [
    ("{}", {}),
    (f"{{city:{Q}Rome{Q}}}", {"city": "Rome"}),
    (f'{{code:{Q}if a < b: {{print("x, y")}}\n{Q},n:3}}', {"code": 'if a < b: {print("x, y")}\n', "n": 3}),
    ("{a:-1.5e3,b:true,c:false,d:null,e:None}", {"a": -1500.0, "b": True, "c": False, "d": None, "e": None}),
    (f"{{a:[1,{Q}x{Q},[true]],b:{{c:{{}},d:[]}}}}", {"a": [1, "x", [True]], "b": {"c": {}, "d": []}}),
    (f"{{{Q}a b{Q}:1, c : 2 , \nd:[ 1 , 2 ] }}", {"a b": 1, "c": 2, "d": [1, 2]}),
    ('{city:"Rome, \\"old\\"",unit:celsius}', {"city": 'Rome, "old"', "unit": "celsius"}),
]
NO_CALLS = ["", "words", "call:f", "call:f{", "call:f{a}", "call:f{a:}", "call:f{a:1", "call:f{a:1 b:2", "call:f{a:1}}",
            f"call:f{{a:{Q}x}}", "call:f{a:[1}", "call:f" + "{a:" * 300, "call:f{a:" + "[" * 100_000]  # fmt: skip


@pytest.mark.parametrize(("arguments", "wanted"), VALUES)
def test_arguments(arguments: str, wanted: Any) -> None:
    text = f"Look.<|tool_call>call:f{arguments}<tool_call|><|tool_call>call:g{{}}<tool_call|>"
    for size in (1, 2, 5, 1000):
        message = read(text, OutputFormat(None, False, GEMMA), size)
        got = [(call["name"], json.loads(call["arguments"])) for call in message.calls]
        assert (message.content, got) == ("Look.", [("f", wanted), ("g", {})]), f"pieces of {size} characters"


@pytest.mark.parametrize("block", NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_is_no_call_is_text(block: str) -> None:
    assert gemma_calls(block) == ([], block)
    text = f"<|tool_call>{block}<tool_call|>"
    assert read(text, OutputFormat(None, False, GEMMA), 1000).content == text


def test_markers_within_texts_are_text() -> None:
    code = "print('<tool_call|>', \"<|tool_call>call:g{}<tool_call|>\")"
    text = f"<|tool_call>call:f{{code:{Q}{code}{Q},n:1}}<tool_call|> Done."
    for size in (1, 3, 1000):
        message = read(text, OutputFormat(None, False, GEMMA), size)
        got = [(call["name"], json.loads(call["arguments"])) for call in message.calls]
        assert (message.content, got) == ("Done.", [("f", {"code": code, "n": 1})]), f"pieces of {size} characters"
    open_text = f"<|tool_call>call:f{{a:{Q}x}}<tool_call|> and more <|tool_call>call:g{{}}<tool_call|>"
    message = read(open_text, OutputFormat(None, False, GEMMA), 4)
    assert [call["name"] for call in message.calls] == ["g"], "a text without an end ends with the call"
    assert message.content.startswith(open_text[:30])


PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["c", "f"]},
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"], "minimum": 1},
        "at": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "any": {},
    },
    "required": ["city"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}, "in": {"$ref": "#/$defs/place"}}}},
}
GOOD = [
    f"city:{Q}Rome{Q}",
    f'city:{Q}a < b <| "{Q}',
    f"at:{{x:1.5}},city:{Q}{Q},days:null,unit:{Q}c{Q}",
    f"at:{{in:{{in:{{}},x:2}}}},city:{Q}x{Q},days:2",
    f"city:{Q}x{Q},tags:[{Q}a{Q},{Q}b{Q}]",
    f"any:{Q}x{Q},city:{Q}x{Q}",
]
BAD = ["", "city:Rome", f"city:{Q}x{Q},", f"days:1,city:{Q}x{Q}", f"city:{Q}x{Q},days:0", f"city:{Q}x{Q},unit:{Q}k{Q}",
       f"city:{Q}x{Q},tags:[]", f"at:{{y:1}},city:{Q}x{Q}", f"city:{Q}x{Q},other:1"]  # fmt: skip


def test_the_grammar_holds_to_schemas() -> None:
    grammar = call_grammar(GEMMA, [{"name": "f", "parameters": PARAMETERS}], several=False)
    texts = {body: f"<|tool_call>call:f{{{body}}}<tool_call|>" for body in GOOD + BAD}
    assert [body for body in GOOD if not accepts(grammar, texts[body])] == []
    assert [body for body in BAD if accepts(grammar, texts[body])] == []
    assert all(gemma_calls(f"call:f{{{body}}}")[0] for body in GOOD)


@pytest.mark.parametrize("parameters", [{"type": "object"}, {"$ref": "#"}, {"anyOf": []}, {"properties": {"a": True}}])
def test_any_arguments(parameters: Any) -> None:
    grammar = call_grammar(GEMMA, [{"name": "f", "parameters": parameters}], several=True)
    assert accepts(grammar, "<|tool_call>call:f{}<tool_call|>" * 2)


IMPOSSIBLE: list[Any] = [
    False, {"not": {}}, {"enum": []}, {"anyOf": []}, {"anyOf": [False, {"enum": []}]},
    {"type": "integer", "minimum": 2, "maximum": 1}, {"type": "array", "items": False, "minItems": 1},
    {"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 2},
]  # fmt: skip


@pytest.mark.parametrize("schema", IMPOSSIBLE, ids=str)
@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (GEMMA, f"<|tool_call>call:f{{y:{Q}a{Q}}}<tool_call|>"),
        (GLM, "<tool_call>f\n<arg_key>y</arg_key>\n<arg_value>a</arg_value>\n</tool_call>"),
    ],
    ids=["gemma", "glm"],
)
def test_parameters_that_no_value_fits_are_left_out(format_: ToolFormat, text: str, schema: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema, "y": {"type": "string"}}, "required": ["y"]}
    assert accepts(call_grammar(format_, [{"name": "f", "parameters": parameters}], several=False), text)
    tools = [{"name": "f", "parameters": parameters | {"required": ["x"]}}]
    with pytest.raises(ApiError, match="parameters of tool f: "):
        call_grammar(format_, tools, several=False)


def test_a_reference_to_nothing_is_refused() -> None:
    tools = [{"name": "f", "parameters": {"properties": {"x": {"$ref": "#/nowhere"}}}}]
    with pytest.raises(ApiError, match="#/nowhere points nowhere"):
        call_grammar(GEMMA, tools, several=False)


LATER: list[Any] = [{"minItems": "x"}, {"minItems": None}, {"minItems": 10**9}, {"items": {"required": 1}}]


@pytest.mark.parametrize("keywords", LATER, ids=str)
def test_keywords_that_cannot_be_held_to(keywords: dict[str, Any]) -> None:
    tools = [{"name": "f", "parameters": {"properties": {"x": {"type": "array"} | keywords}}}]
    with pytest.raises(ApiError, match="parameters of tool f: "):
        call_grammar(GEMMA, tools, several=False)
    lazy = call_grammar(GEMMA, tools, several=False, lazy=True)
    assert accepts(lazy, f"call:f{{x:{Q}any{Q}}}<tool_call|>"), "calls that are not asked for may have any arguments"


def test_a_type_that_no_value_has_leaves_the_others() -> None:
    schema = {"type": ["array", "integer"], "items": False, "minItems": 1}
    tools = [{"name": "f", "parameters": {"properties": {"x": schema}, "required": ["x"]}}]
    assert accepts(call_grammar(GEMMA, tools, several=False), "<|tool_call>call:f{x:1}<tool_call|>")


def test_rules_that_were_made_for_a_refused_schema_go_with_it() -> None:
    """What is shared among tools must not name rules of the attempt that any arguments take the place of."""
    numbers = {"type": "array", "items": {"type": "integer"}}
    refused = {"properties": {"a": numbers, "b": {"type": "array", "minItems": 10**6}}}
    tools = [{"name": "f", "parameters": refused}, {"name": "g", "parameters": {"properties": {"a": numbers}}}]
    lazy = call_grammar(GEMMA, tools, several=False, lazy=True)
    assert accepts(lazy, f"call:f{{b:{Q}any{Q}}}<tool_call|>")
    assert accepts(lazy, "call:g{a:[1,2]}<tool_call|>") and not accepts(lazy, f"call:g{{a:{Q}x{Q}}}<tool_call|>")


def test_schemas_that_refer_to_each_other_a_lot() -> None:
    properties = {f"p{i}": {"$ref": "#"} for i in range(100)}
    tools = [{"name": name, "parameters": {"properties": properties}} for name in "fg"]
    with pytest.raises(ApiError, match="more than 50000 schemas"):
        call_grammar(GEMMA, tools, several=False)
    assert accepts(call_grammar(GEMMA, tools, several=False, lazy=True), f"call:g{{x:{Q}any{Q}}}<tool_call|>")


def test_the_format_is_found() -> None:
    template = "{% for t in tools %}<|tool>{{ t }}<tool|>{% endfor %}{{ '<|tool_call>call:' + name }}<|\"|><tool_call|>"
    assert tool_format(template) is GEMMA
    assert tool_format("{% if tools %}<|tool_call|>") is not GEMMA


HUNYUAN = (
    "{{ tools }}<think></think>{% if '<answer>' in c and '</answer>' in c %}{{ c.split('<answer>')[-1] }}<tool_calls>"
)
CALL = '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<think>\nWhy\n</think>\n<answer>\nBecause.\n\nSo.\n</answer>", "Because.\n\nSo.", 0),
        (
            "<think>\nWhy\n</think>\n<answer>\nA <answer> tag\n</answer> here\n</answer>",
            "A <answer> tag\n</answer> here",
            0,
        ),
        ("<think>\nWhy\n</think>\nBecause.", "Because.", 0),
        (f"<think>\nWhy\n</think>\n<answer>\nI look.\n{CALL}\n</answer>", "I look.\n", 1),
        (f"<think>\nWhy\n</think>\n<answer>\nI look.\n</answer>\n{CALL}", "I look.", 1),
    ],
)
def test_tags_around_answers(text: str, content: str, calls: int) -> None:
    assert tool_format(HUNYUAN) is TOOL_CALLS
    output = OutputFormat(reasoning_tags(HUNYUAN), False, TOOL_CALLS, answer=answer_tags(HUNYUAN))
    for size in range(1, len(text) + 1):
        message = read(text, output, size)
        assert (message.content, message.reasoning.strip(), len(message.calls)) == (content, "Why", calls), size
