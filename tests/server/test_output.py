"""Stop strings, whole characters, reasoning and tool calls, with the text cut into pieces everywhere."""

from __future__ import annotations

import json

import pytest

from ikpy.server.chat.output import ChatMessage, OutputFormat, OutputReader
from ikpy.server.chat.tool_blocks import DEEPSEEK, GLM, KIMI, LLAMA
from ikpy.server.chat.tool_formats import HERMES, MISTRAL, call_grammar, tool_format
from ikpy.server.chat.tool_reading import ToolFormat
from ikpy.server.errors import ApiError
from ikpy.server.text_stream import TextStream

THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "stops", "want", "word"),
    [
        ("One, two STOP three", ("STOP",), "One, two ", "STOP"),
        ("One, two STOP three", ("three", "STOP"), "One, two ", "STOP"),
        ("aaab", ("aab",), "a", "aab"),
        ("abc", ("x",), "abc", None),
        ("abST", ("STOP",), "abST", None),
        ("café 😀", ("😀",), "café ", "😀"),
        ("anything", ("",), "", ""),
    ],
)
def test_stop_strings_across_pieces(text: str, stops: tuple[str, ...], want: str, word: str | None) -> None:
    data = text.encode()
    for size in range(1, len(data) + 1):
        stream, out = TextStream(stops), ""
        for i in range(0, len(data), size):
            if stream.stopping_word is None:
                out += stream.feed(data[i : i + size]) or ""
        if stream.stopping_word is None:
            out += stream.finish()
        assert (out, stream.text, stream.stopping_word) == (want, want, word), f"pieces of {size} bytes"


def test_invalid_bytes_become_replacement_characters() -> None:
    stream = TextStream(())
    assert stream.feed(b"ab\xff") == "ab�"
    assert stream.feed(b"\xe2\x82") is None
    assert stream.finish() == "�"


def read(text: str, output: OutputFormat, size: int) -> ChatMessage:
    reader, message = OutputReader(output), ChatMessage()
    for i in range(0, len(text), size):
        for delta in reader.feed(text[i : i + size]):
            message.add(delta)
    for delta in reader.finish():
        message.add(delta)
    return message


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"", "b": [1, {"c": 2}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}</tool_call>\\"", "b": [1, {"c": 2}]}'
HERMES_CASES = [
    ("plain text", "plain text", "", []),
    (CALL, "", "", [("f", ARGUMENTS)]),
    (f"Look.\n{CALL}\n{CALL}", "Look.\n", "", [("f", ARGUMENTS)] * 2),
    (f"<think>\nhm\n</think>\n\n{CALL}", "", "hm\n", [("f", ARGUMENTS)]),
    ("<think>never closed", "", "never closed", []),
    ("  <think>x</think>y", "y", "x", []),
    ("a < b <tool", "a < b <tool", "", []),
    ('<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "", "", [("g", '{"x": 1}')]),
    ('<tool_call>{"name": "g"}</tool_call>!', "!", "", [("g", "{}")]),
    ("<tool_call>{broken}</tool_call> end", "<tool_call>{broken}</tool_call>end", "", []),
    ('<tool_call>{"name": "g", "arguments": {bad}}</tool_call>',
     '<tool_call>{"name": "g", "arguments": {bad}}</tool_call>', "", []),
    ("<tool_call>never closed", "<tool_call>never closed", "", []),
    ('<tool_call>{"name": "g", "arguments": {"a": "cut', "", "", [("g", '{"a": "cut')]),
    ('<tool_call>{"name": "g", "ar', "", "", [("g", "{")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), HERMES_CASES)
def test_reasoning_and_tagged_calls(text: str, content: str, reasoning: str, calls: list[tuple[str, str]]) -> None:
    for size in range(1, len(text) + 1):
        message = read(text, OutputFormat(THINK, False, HERMES), size)
        got = (message.content, message.reasoning, [(call["name"], call["arguments"]) for call in message.calls])
        assert got == (content, reasoning, calls), f"pieces of {size} characters"


def test_a_prompt_that_ends_inside_reasoning() -> None:
    message = read("\nhm</think>\nyes", OutputFormat(THINK, True), 3)
    assert (message.reasoning, message.content) == ("hm", "yes")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abc"}]', "", [("abc", "f", '{"a": 1}')]),
        ('Hi[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "Hi", None),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        ('[TOOL_CALLS][{"nom": 1}]', '[TOOL_CALLS][{"nom": 1}]', []),
    ],
)
def test_listed_calls(text: str, content: str, calls: list[tuple[str, str, str]] | None) -> None:
    for size in range(1, len(text) + 1):
        message = read(text, OutputFormat(None, False, MISTRAL), size)
        got = [(call["id"], call["name"], call["arguments"]) for call in message.calls]
        assert message.content == content, f"pieces of {size} characters"
        assert got == calls if calls is not None else [call[1] for call in got] == ["f", "g"]


DEEPSEEK_TEXT = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
    '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"b": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
KIMI_TEXT = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"b": "x"}<|tool_call_end|><|tool_calls_section_end|>'
)
GLM_TEXT = (
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "<tool_call>g\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
)


@pytest.mark.parametrize(("format_", "text"), [(DEEPSEEK, DEEPSEEK_TEXT), (KIMI, KIMI_TEXT), (GLM, GLM_TEXT)])
def test_blocks_of_calls(format_: ToolFormat, text: str) -> None:
    for size in (1, 2, 3, 7, 1000):
        message = read(f"Look. {text}", OutputFormat(None, False, format_), size)
        got = [(call["name"], json.loads(call["arguments"])) for call in message.calls]
        assert got == [("f", {"a": 1}), ("g", {"b": "x"})], f"pieces of {size} characters"
        assert message.content == "Look. "


@pytest.mark.parametrize(("format_", "text"), [(DEEPSEEK, DEEPSEEK_TEXT), (KIMI, KIMI_TEXT), (GLM, GLM_TEXT)])
def test_damaged_blocks_are_text(format_: ToolFormat, text: str) -> None:
    broken = text.replace('{"a": 1}', "{a: 1}").replace("<arg_key>a", "a").partition("\n<tool_call>g")[0]
    message = read(broken, OutputFormat(None, False, format_), 5)
    assert (message.content, message.calls) == (broken, [])


def test_llama_calls() -> None:
    message = read('{"name": "f", "parameters": {"a": 1}}', OutputFormat(None, False, LLAMA), 4)
    assert [(call["name"], call["arguments"]) for call in message.calls] == [("f", '{"a": 1}')]
    assert read('{"name": 5}', OutputFormat(None, False, LLAMA), 4).content == '{"name": 5}'


def test_formats_are_found_in_templates() -> None:
    assert tool_format("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert tool_format("{{ tools }}[TOOL_CALLS]") is MISTRAL
    assert tool_format("{{ tools }}<tool_call><arg_key>") is GLM
    assert tool_format("{{ tools }}<｜tool▁calls▁begin｜>") is DEEPSEEK
    assert tool_format("{{ tools }}<|tool_calls_section_begin|>") is KIMI
    assert tool_format("{{ tools }}<|python_tag|>") is LLAMA
    assert tool_format("no <tool_call> without the variable") is None
    assert tool_format("{{ tools }}") is None


def test_grammar_of_required_calls_names_every_tool() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    text = call_grammar(HERMES, [{"name": "f", "parameters": schema}, {"name": "g"}], several=False)
    assert text.startswith('root ::= "<tool_call>\\n" call "\\n</tool_call>"\n')
    for name in ("f", "g"):
        assert json.dumps(f'{{"name": "{name}", "arguments": ') in text
    assert "parameters" in call_grammar(LLAMA, [{"name": "g"}], several=False)
    with pytest.raises(ApiError, match="cannot force"):
        call_grammar(KIMI, [{"name": "g"}], several=False)
    assert 'tool0-root ::= "{" tool0-space' in text
