"""Stop strings, whole characters, reasoning and tool calls, with the text cut into pieces everywhere."""

from __future__ import annotations

import json
import time

import pytest

from ikpy.server.chat.harmony import HARMONY
from ikpy.server.chat.invoked_calls import DEEPSEEK_DSML, DEEPSEEK_V4, MINIMAX
from ikpy.server.chat.output import ChatMessage, OutputFormat
from ikpy.server.chat.streamed_lists import COHERE, FUNCTOOLS, GRANITE, NEMOTRON, PHI, TOOL_CALLS
from ikpy.server.chat.tagged_values import CODER, GLM, SEED
from ikpy.server.chat.tool_blocks import DEEPSEEK, DEEPSEEK_PLAIN, KIMI, LLAMA, SOLAR
from ikpy.server.chat.tool_formats import FUNCTIONARY, GIGACHAT, HERMES, MISTRAL, MISTRAL_ARGS, tool_format
from ikpy.server.chat.tool_reading import ToolFormat
from ikpy.server.routes_anthropic import to_chat as anthropic_to_chat
from ikpy.server.routes_responses import to_chat
from ikpy.server.text_stream import TextStream
from ikpy.tools.stop_strings import overlap

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
    reader, message = output.reader(), ChatMessage()
    for i in range(0, len(text), size):
        for delta in reader.feed(text[i : i + size]):
            message.add(delta)
    for delta in reader.finish(cut=False):
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
    for size in range(1, 30):
        message = read("\nhm</think>\nyes", OutputFormat(THINK, True), size)
        assert (message.reasoning, message.content) == ("hm", "yes")
        again = read("<think>\nhm <think> </think>\nyes", OutputFormat(THINK, True), size)
        assert (again.reasoning, again.content) == ("hm <think> ", "yes"), "some models write the tag of the prompt"
        cut = read("<thi", OutputFormat(THINK, True), size)
        assert (cut.reasoning, cut.content) == ("<thi", "")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abc"}]', "", [("abc", "f", '{"a": 1}')]),
        ('Hi[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "Hi", None),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        ('[TOOL_CALLS][{"nom": 1}]', '[TOOL_CALLS][{"nom": 1}]', []),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1e400}}]',
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1e400}}]',
            [],
        ),
    ],
)
def test_listed_calls(text: str, content: str, calls: list[tuple[str, str, str]] | None) -> None:
    for size in range(1, len(text) + 1):
        message = read(text, OutputFormat(None, False, MISTRAL), size)
        got = [(call["id"], call["name"], call["arguments"]) for call in message.calls]
        assert message.content == content, f"pieces of {size} characters"
        assert got == calls if calls is not None else [call[1] for call in got] == ["f", "g"]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}', "", [("f", '{"a": {"b": "}"}}')]),
        (
            'Hi[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]g [ARGS] {"b": 1}',
            "Hi",
            [("f", "{}"), ("g", '{"b": 1}')],
        ),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        ("[TOOL_CALLS]" + "a " * 400, "[TOOL_CALLS]" + "a " * 400, []),
        ('[TOOL_CALLS]f[ARGS]{"a": 1', "", [("f", '{"a": 1')]),
    ],
)
def test_named_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for size in (1, 2, 3, 7, 1000):
        message = read(text, OutputFormat(None, False, MISTRAL_ARGS), size)
        assert [(call["name"], call["arguments"]) for call in message.calls] == calls, f"pieces of {size} characters"
        assert message.content == content
        assert "CALL_ID" not in text or message.calls[0]["id"] == "a1B2c3D4e"


DEEPSEEK_TEXT = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
    '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"b": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
KIMI_TEXT = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"b": "x"}<|tool_call_end|><|tool_calls_section_end|>'
)
SOLAR_TEXT = (
    "<|tool_calls|>"
    + "".join(
        f"<|tool_call:begin|>1<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"
        for name, arguments in (("f", '{"a": 1}'), ("g", '{"b": "x"}'))
    )
    + "<|calls|>"
)
DEEP = "[" * 5000
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


@pytest.mark.parametrize(("format_", "text"), [(DEEPSEEK, DEEPSEEK_TEXT), (KIMI, KIMI_TEXT), (SOLAR, SOLAR_TEXT)])
def test_markers_within_texts_of_json_are_text(format_: ToolFormat, text: str) -> None:
    """A model may well write about the template of its own calls. A text without an end ends with the block."""
    value = 'say "' + " ".join(format_.markers) + '" ```'
    whole = text.replace('"x"', json.dumps(value, ensure_ascii=False))
    for size in (1, 3, 1000):
        message = read(f"Look. {whole} Done.", OutputFormat(None, False, format_), size)
        got = [(call["name"], json.loads(call["arguments"])) for call in message.calls]
        assert got == [("f", {"a": 1}), ("g", {"b": value})], f"pieces of {size} characters"
        message = read(text.replace('"x"', '"x'), OutputFormat(None, False, format_), size)
        assert [call["name"] for call in message.calls] == ["f"] and '{"b": "x}' in message.content
    for part in ('"', "\\", "a", '"a', "{", "\t\n"):
        began = time.perf_counter()
        read(text.replace('"x"', part * 40000), OutputFormat(None, False, format_), 1000)
        assert time.perf_counter() - began < 2, part


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (MISTRAL, f"[TOOL_CALLS]{DEEP}"),
        (MISTRAL, f"[TOOL_CALLS]{DEEP}]"),
        (HERMES, f'<tool_call>{{"arguments": {DEEP}</tool_call>'),
        (KIMI, KIMI_TEXT.replace('{"a": 1}', DEEP)),
        (DEEPSEEK, DEEPSEEK_TEXT.replace('{"a": 1}', DEEP)),
    ],
)
def test_calls_nested_too_deep_are_text(format_: ToolFormat, text: str) -> None:
    message = read(text, OutputFormat(None, False, format_), len(text))
    assert (message.content, message.calls) == (text, [])


def test_a_value_nested_too_deep_is_a_string() -> None:
    text = GLM_TEXT.replace("1", DEEP).partition("\n<tool_call>g")[0]
    (call,) = read(text, OutputFormat(None, False, GLM), len(text)).calls
    assert json.loads(call["arguments"]) == {"a": DEEP}


def test_a_call_cut_behind_many_arguments_is_text() -> None:
    """Backtracking over the ways to divide them would take longer than the test may."""
    text = "<tool_call>f\n" + "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n" * 200 + "<arg_key>b"
    message = read(text, OutputFormat(None, False, GLM), 1000)
    assert (message.content, message.calls) == (text, [])


@pytest.mark.parametrize(("format_", "text"), [(DEEPSEEK, DEEPSEEK_TEXT), (KIMI, KIMI_TEXT), (GLM, GLM_TEXT)])
def test_damaged_blocks_are_text(format_: ToolFormat, text: str) -> None:
    broken = text.replace('{"a": 1}', "{a: 1}").replace("<arg_key>a", "a").partition("\n<tool_call>g")[0]
    message = read(broken, OutputFormat(None, False, format_), 5)
    assert (message.content, message.calls) == (broken, [])


def test_llama_calls() -> None:
    message = read('{"name": "f", "parameters": {"a": 1}}', OutputFormat(None, False, LLAMA), 4)
    assert [(call["name"], call["arguments"]) for call in message.calls] == [("f", '{"a": 1}')]
    assert read('{"name": 5}', OutputFormat(None, False, LLAMA), 4).content == '{"name": 5}'


@pytest.mark.parametrize(
    "begin", ['{"type": "function", "name": ', '{"type":"function","name":', '{ "name": ', '{"name" : ']
)
def test_other_beginnings_of_llama_calls(begin: str) -> None:
    text = f'Well. {begin}"f", "parameters": {{"a": 1}}}}'
    for size in (1, 3, 100):
        message = read(text, OutputFormat(None, False, LLAMA), size)
        assert [(call["name"], call["arguments"]) for call in message.calls] == [("f", '{"a": 1}')]
        assert message.content == "Well. "
        person = read(f'{begin}"Ann", "age": 30}}', OutputFormat(None, False, LLAMA), size)
        assert (person.content, person.calls) == (f'{begin}"Ann", "age": 30}}', []), "no call without arguments"


def test_several_objects_between_two_tags() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {"b": 2}}\n</tool_call>'
    for end in ("</tool_call>", ""):
        for size in (1, 5, 1000):
            message = read(text.removesuffix("</tool_call>") + end, OutputFormat(None, False, HERMES), size)
            calls = [(call["name"], call["arguments"]) for call in message.calls]
            assert calls == [("f", '{"a": 1}'), ("g", '{"b": 2}')], f"pieces of {size} characters"
    more = '<tool_call>{"name": "f", "arguments": {}, "meta": {"name": "g"}}</tool_call>'
    assert [call["name"] for call in read(more, OutputFormat(None, False, HERMES), 7).calls] == ["f"]


@pytest.mark.parametrize(("format_", "text"), [(DEEPSEEK, DEEPSEEK_TEXT), (KIMI, KIMI_TEXT)])
def test_calls_before_a_malformed_one_stand(format_: ToolFormat, text: str) -> None:
    for broken in (text.replace('{"b": "x"}', '{"b": x}'), text[: text.index('"x"')]):
        message = read(broken, OutputFormat(None, False, format_), 5)
        assert [call["name"] for call in message.calls] == ["f"]
        assert (
            message.content.strip()
            == broken[broken.index("\n<｜" if "\n<｜" in broken else "<|tool_call_begin|>functions.g") :].strip()
        )


def test_formats_are_found_in_templates() -> None:
    assert tool_format("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert tool_format("{{ tools }}[TOOL_CALLS]") is MISTRAL
    assert tool_format("{{ tools }}[TOOL_CALLS]name[ARGS]") is MISTRAL_ARGS
    assert tool_format("{{ tools }}<tool_call><arg_key>") is GLM
    assert tool_format("{{ tools }}<tool_call>\n<function=f>\n<parameter=a>") is CODER
    assert tool_format("{{ tools }}<seed:tool_call>\n<function=f>\n<parameter=a>") is SEED
    assert tool_format("{{ tools }}<｜tool▁calls▁begin｜>```json") is DEEPSEEK
    assert tool_format("{{ tools }}<｜tool▁calls▁begin｜>") is DEEPSEEK_PLAIN
    assert tool_format("{{ tools }}<|channel|><|message|>") is HARMONY
    assert tool_format("{{ tools }}<|tool_calls_section_begin|>") is KIMI
    assert tool_format("{{ tools }}<|python_tag|>") is LLAMA
    assert tool_format('{{ tools }}<minimax:tool_call><invoke name="f"><parameter name="a">') is MINIMAX
    assert tool_format("{% set d = '｜DSML｜' %}{{ tools }}<{{ d }}function_calls>") is DEEPSEEK_DSML
    assert tool_format("{% set d = '｜DSML｜' %}{{ tools }}<{{ d }}tool_calls>") is DEEPSEEK_V4
    assert tool_format("{{ tools }}respond with <|tool_call|> and a list") is GRANITE
    assert tool_format("{{ tools }}<|tool_call|>{}<|/tool_call|>") is PHI
    assert tool_format("<|tool|>{{ message['tools'] }}<|/tool|>") is PHI
    assert tool_format("{{ tools }}functools[{}]") is FUNCTOOLS
    assert tool_format("{{ functions }}<functools[{}]") is FUNCTOOLS
    assert tool_format("{{ tools }}<function={}</function><|python_tag|>") is FUNCTIONARY
    assert tool_format("{{ tools }}function call{{ '<|role_sep|>' }}") is GIGACHAT
    assert tool_format("{{ tools }}<|START_ACTION|>tool_name<|END_ACTION|>") is COHERE
    assert tool_format("{{ tools }}<TOOLCALL>[]</TOOLCALL>") is NEMOTRON
    assert tool_format("{{ tools }}<tool_calls>[]</tool_calls>") is TOOL_CALLS
    assert tool_format("{{ tools }}within <tool_call></tool_call>: <tool_calls>[{}]</tool_calls>") is TOOL_CALLS
    assert tool_format("no <tool_call> without the variable") is None
    assert tool_format("{{ tools }}") is None


HARMONY_TEXT = (
    "<|channel|>analysis<|message|>Hm, a question.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>Done.'
)


@pytest.mark.parametrize("size", [1, 2, 5, 13, 1000])
def test_harmony_channels(size: int) -> None:
    message = read(HARMONY_TEXT, OutputFormat(THINK, False, HARMONY, harmony=True), size)
    assert (message.reasoning, message.content) == ("Hm, a question.", "Done.")
    assert [(call["name"], call["arguments"]) for call in message.calls] == [("f", '{"a": 1}')]
    early = read(
        ' to=functions.g<|channel|>commentary json<|message|>{"b": 2}', OutputFormat(None, False, HARMONY, True), size
    )
    assert [(call["name"], call["arguments"]) for call in early.calls] == [("g", '{"b": 2}')]
    plain = read("Hello <b> there", OutputFormat(THINK, False, None, harmony=True), size)
    assert plain.content == "Hello <b> there"
    cut = read("<|channel|>analysis<|message|>Only thoughts", OutputFormat(THINK, False, None, harmony=True), size)
    assert (cut.reasoning, cut.content) == ("Only thoughts", "")
    kept = read(HARMONY_TEXT, OutputFormat(None, False, HARMONY, harmony=True), size)
    assert kept.content == "Hm, a question.Done."


def test_tool_outputs_of_parts_are_texts() -> None:
    parts = [{"type": "input_text", "text": "42"}]
    body = {"input": [{"type": "function_call_output", "call_id": "1", "output": parts}]}
    assert to_chat(body)["messages"][0]["content"] == [{"type": "text", "text": "42"}]


def test_tools_of_other_servers_are_left_out() -> None:
    """Coding agents offer them beside their own; nobody would carry out a call."""
    shell = {"type": "function", "name": "shell", "parameters": {}, "strict": False}
    body = {"input": "Hi", "tools": [{"type": "web_search"}, shell, {"type": "custom", "name": "apply_patch"}]}
    assert [tool["function"]["name"] for tool in to_chat(body)["tools"]] == ["shell"]
    anthropic = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "custom", "name": "read", "input_schema": {}},
    ]
    converted = anthropic_to_chat({"messages": [], "tools": anthropic})
    assert [tool["function"]["name"] for tool in converted["tools"]] == ["bash", "read"]


@pytest.mark.parametrize(
    ("text", "marker", "want"),
    [("abST", "STOP", 2), ("aab", "aabc", 3), ("aaab", "aabc", 3), ("abab", "ababc", 4), ("ab", "ab", 0), ("", "x", 0),
     ("STOP", "STOP", 0), ("xSTO", "STOP", 3), ("a", "aa", 1), ("aa", "aa", 1)],
)  # fmt: skip
def test_overlap_with_a_marker(text: str, marker: str, want: int) -> None:
    assert overlap(text, marker) == want
    assert want == max((n for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0)
