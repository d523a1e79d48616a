"""Arguments in tags of their own (GLM 4.5, Qwen3-Coder): what may be written, and what is read."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import pytest

from ikpy.engine.grammars.grammar import TokenTexts, gbnf_grammar
from ikpy.server.chat.call_grammar import call_grammar
from ikpy.server.chat.invoked_calls import DEEPSEEK_DSML, DSML, MINIMAX
from ikpy.server.chat.output import OutputFormat
from ikpy.server.chat.python_calls import LFM2
from ikpy.server.chat.tagged_values import CODER, GLM, takes_text, text_without, typed_value, value_types
from ikpy.server.chat.tool_reading import ToolFormat
from ikpy.server.errors import ApiError
from tests.server.test_output import read

BYTES = TokenTexts([bytes([i]) for i in range(256)], special=(), eog=(0,))
WRITE = {
    "name": "write",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}},
            "mode": {"enum": ["w", "a"]},
        },
        "required": ["path"],
        "$defs": {"Line": {"type": "integer"}},
    },
}


def glm(**values: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>write\n{''.join(pairs)}</tool_call>"


def coder(**values: str) -> str:
    pairs = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=write>\n{''.join(pairs)}</function>\n</tool_call>"


def accepts(source: str, text: str) -> bool:
    grammar = gbnf_grammar(source, BYTES)
    for byte in text.encode():
        if not grammar.allows(byte):
            return False
        grammar.accept(byte)
    return grammar.complete


@pytest.mark.parametrize("size", range(7))
def test_texts_without_a_marker(size: int) -> None:
    source = f"root ::= {text_without('<ab')}"
    for letters in itertools.product("<ab", repeat=size):
        text = "".join(letters)
        assert accepts(source, text) == ("<ab" not in text), text


@pytest.mark.parametrize(("format_", "write"), [(GLM, glm), (CODER, coder)])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"path": "a.html", "content": "<p>if a < b && c <= d </p></ar <<"}, None),
        ({"path": "42", "content": '{"a": 1}'}, None),
        ({"path": '"quoted"', "content": "null", "lines": "[1, 2]", "mode": "w"}, {"content": None, "lines": [1, 2]}),
        ({"path": "two\nlines\n\n", "content": ""}, None),
    ],
)
def test_strings_are_texts_whatever_they_look_like(
    format_: ToolFormat, write: Any, given: dict[str, str], meant: dict[str, Any] | None
) -> None:
    text = write(**given)
    assert accepts(call_grammar(format_, [WRITE], several=False), text)
    for size in (1, 7, 1000):
        (call,) = read(text, OutputFormat(None, False, format_.knowing([WRITE])), size).calls
        assert call["name"] == "write" and json.loads(call["arguments"]) == given | (meant or {})


@pytest.mark.parametrize(("format_", "write"), [(GLM, glm), (CODER, coder)])
def test_other_values_follow_their_schema(format_: ToolFormat, write: Any) -> None:
    source = call_grammar(format_, [WRITE], several=False)
    assert not accepts(source, write(path="a", lines='["x"]'))
    assert not accepts(source, write(path="a", mode="r"))
    assert not accepts(source, write(content="no path"))


@pytest.mark.parametrize("text", [coder(path="a").replace("</function>", ""), "<tool_call>\n{}\n</tool_call>"])
def test_what_is_no_call_is_text(text: str) -> None:
    message = read(text, OutputFormat(None, False, CODER), 5)
    assert (message.content, message.calls) == (text, [])


def test_long_texts_take_linear_time() -> None:
    """Some hundred thousand characters; with quadratic time the test would not end."""
    text = glm(path="a", content="if (a < b) { return </a>; }\n" * 5000)
    assert accepts(call_grammar(GLM, [WRITE], several=False), text)


def test_types_of_schemas() -> None:
    assert value_types({"type": ["string", "null"]}) == {"string", "null"}
    assert value_types({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}, {"type": "array"}]}]}) == {
        "integer",
        "null",
        "array",
    }
    assert value_types({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/X"}]}) == set()
    assert takes_text({"description": "anything"}) and takes_text({"type": "string"}) and takes_text(True)
    assert (
        not takes_text({"enum": ["a"]}) and not takes_text({"$ref": "#/$defs/X"}) and not takes_text({"type": "null"})
    )
    assert typed_value("1", {"type": "number"}) == 1 and typed_value("true", {"type": "integer"}) == "true"
    assert typed_value("1.5", None) == 1.5 and typed_value("[", {"type": "array"}) == "["


def minimax(**values: str) -> str:
    pairs = (f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<minimax:tool_call>\n<invoke name="write">\n{"".join(pairs)}</invoke>\n</minimax:tool_call>'


def dsml(**values: str) -> str:
    pairs = (
        f'<{DSML}parameter name="{key}" string="true">{value}</{DSML}parameter>\n' for key, value in values.items()
    )
    calls = f'<{DSML}invoke name="write">\n{"".join(pairs)}</{DSML}invoke>'
    return f"<{DSML}function_calls>\n{calls}\n</{DSML}function_calls>"


OPEN_SCHEMAS: list[tuple[Any, bool, bool]] = [
    ({"type": "object"}, True, True),
    ({"type": "object", "properties": {"path": {"type": "string"}}}, True, False),
    ({"type": "object", "properties": {"path": {"type": "string"}}, "additionalProperties": True}, True, True),
    ({"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}, True, True),
    ({"type": "object", "additionalProperties": False}, False, False),
    ({"properties": {"path": {"not": {}}}}, False, False),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"path": {"type": "string"}}}}}, True, False),
    ({"allOf": [{"properties": {"path": {}}}, {"properties": {"b": {}}, "required": ["path"]}]}, True, False),
    # one that no grammar can be made of, so any parameters will do
    ({"properties": {"x": {"type": "array", "items": {"type": "nothing"}}}}, True, True),
]


@pytest.mark.parametrize(("format_", "write"), [(GLM, glm), (CODER, coder), (MINIMAX, minimax), (DEEPSEEK_DSML, dsml)])
@pytest.mark.parametrize(("schema", "takes_path", "takes_more"), OPEN_SCHEMAS)
def test_parameters_that_the_top_of_a_schema_does_not_name(
    format_: ToolFormat, write: Any, schema: Any, takes_path: bool, takes_more: bool
) -> None:
    source = call_grammar(format_, [{"name": "write", "parameters": schema}], several=False, lazy=True)
    begin = format_.trigger or format_.opening
    texts = [write(path="a b"), write(path="a b", other="c")]
    assert [accepts(source, text.partition(begin)[2]) for text in texts] == [takes_path, takes_more]
    tool = {"name": "write", "parameters": schema}
    (call,) = read(texts[1], OutputFormat(None, False, format_.knowing([tool])), 5).calls
    assert json.loads(call["arguments"]) == {"path": "a b", "other": "c"}


LISTED: list[tuple[Any, dict[str, Any]]] = [
    ({"enum": ["w", "a", None], "type": ["string", "null"]}, {"w": "w", "null": None}),
    ({"enum": ["w", 1]}, {"w": "w", "1": 1}),
    ({"const": "w", "type": "string"}, {"w": "w"}),
    ({"const": "w"}, {"w": "w"}),
    ({"enum": ["w", 2], "type": "string"}, {"w": "w"}),
    ({"anyOf": [{"const": "w"}, {"const": 2}]}, {'"w"': "w", "2": 2}),
]


def test_references_lead_to_any_part_of_the_schema() -> None:
    properties = {"n": {"type": "integer"}, "next": {"$ref": "#"}, "same": {"$ref": "#/properties/n"}}
    node = {"type": "object", "properties": properties}
    grammar = call_grammar(GLM, [{"name": "write", "parameters": node}], several=False)
    assert accepts(grammar, glm(n="1", next='{"n": 2, "next": {"same": 3}}', same="4"))
    assert not accepts(grammar, glm(next='{"n": "two"}'))
    assert not accepts(grammar, glm(same="four"))


def test_schemas_are_counted_over_all_parameters() -> None:
    many = {"anyOf": [{"type": "integer"}] * 30_000}
    tools = [{"name": "write", "parameters": {"properties": {"a": many, "b": many}}}]
    with pytest.raises(ApiError, match="more than 50000 schemas"):
        call_grammar(GLM, tools, several=False)


@pytest.mark.parametrize(("format_", "write"), [(GLM, glm), (CODER, coder), (MINIMAX, minimax)])
@pytest.mark.parametrize(("schema", "meanings"), LISTED)
def test_listed_values_are_read_as_the_grammar_writes_them(
    format_: ToolFormat, write: Any, schema: Any, meanings: dict[str, Any]
) -> None:
    tool = {"name": "write", "parameters": {"type": "object", "properties": {"mode": schema}, "required": ["mode"]}}
    source = call_grammar(format_, [tool], several=False)
    for text, meant in meanings.items():
        assert accepts(source, write(mode=text)), text
        (call,) = read(write(mode=text), OutputFormat(None, False, format_.knowing([tool])), 5).calls
        assert json.loads(call["arguments"]) == {"mode": meant}
    assert not accepts(source, write(mode="x")) and not accepts(source, write(mode="3"))


def test_an_attribute_and_listed_values() -> None:
    tool = {"name": "write", "parameters": {"type": "object", "properties": {"mode": {"enum": ["w", None]}}}}
    source = call_grammar(DEEPSEEK_DSML, [tool], several=False)
    for text in ('"w"', "null"):
        written = dsml(mode=text).replace('string="true"', 'string="false"')
        assert accepts(source, written)
        (call,) = read(written, OutputFormat(None, False, DEEPSEEK_DSML.knowing([tool])), 5).calls
        assert json.loads(call["arguments"]) == {"mode": json.loads(text)}


@pytest.mark.parametrize("format_", [GLM, CODER, LFM2], ids=lambda value: value.name)
def test_long_values_take_little_memory(format_: ToolFormat) -> None:
    """A pattern that looks ahead at every character keeps a hundred bytes for each."""
    value = "x = a < b\n" * 40_000
    python = f"<|tool_call_start|>[write(content={value!r})]<|tool_call_end|>"
    text = {GLM.name: glm(content=value), CODER.name: coder(content=value), LFM2.name: python}[format_.name]
    tracemalloc.start()
    try:
        (call,) = read(text, OutputFormat(None, False, format_.knowing([WRITE])), len(text)).calls
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert json.loads(call["arguments"])["content"] == value
    assert peak < 25 * len(text), f"{peak / len(text):.0f} bytes per character"
