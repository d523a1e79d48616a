"""Calls that are given out as they come: lists of objects, invoke elements; and tags around answers."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from ikpy.engine.grammars import strict_json
from ikpy.server.chat.invoked_calls import DEEPSEEK_DSML, MINIMAX
from ikpy.server.chat.listed_calls import ListedCalls
from ikpy.server.chat.output import OutputFormat
from ikpy.server.chat.streamed_lists import COHERE, FUNCTOOLS, GRANITE, NEMOTRON, PHI, TOOL_CALLS
from ikpy.server.chat.tool_blocks import DEEPSEEK_PLAIN, KIMI
from ikpy.server.chat.tool_formats import HERMES, MISTRAL, MISTRAL_ARGS
from ikpy.server.chat.tool_reading import ToolFormat
from tests.server.test_output import DEEPSEEK_TEXT, read
from tests.server.test_tagged_values import WRITE, accepts, call_grammar

F = '{"name": "f", "arguments": {"a": "}]", "b": [1, {"c": 2}]}}'
G = '{"name": "g", "arguments": {}}'
CALLS = [("f", {"a": "}]", "b": [1, {"c": 2}]}), ("g", {})]
COHERE_LIST = (
    '[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "}]", "b": [1, {"c": 2}]}},\n'
    '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]'
)
ACTION = f"<|START_ACTION|>{COHERE_LIST}<|END_ACTION|>"
LISTS: list[tuple[ToolFormat, str, str, Any]] = [
    (GRANITE, f"<|tool_call|>[{F}, {G}]", "", CALLS),
    (GRANITE, f"Look. <|tool_call|> [{F},\n{G}] Done.", "Look. Done.", CALLS),
    (GRANITE, f"<|tool_call|>{F}", "", CALLS[:1]),
    (PHI, f"<|tool_call|>[{F}, {G}]<|/tool_call|>", "", CALLS),
    (PHI, f"<|tool_call|>{F}<|/tool_call|><|tool_call|>{G}<|/tool_call|>", "", CALLS),
    (PHI, f"<|tool_call|>{F}\n{G}<|/tool_call|>!", "!", CALLS),
    (PHI, f"<|tool_call|>[{F}] no end", "no end", CALLS[:1]),
    (FUNCTOOLS, f"functools[{F}, {G}]", "", CALLS),
    (NEMOTRON, f"<TOOLCALL>[{F}, {G}]</TOOLCALL>", "", CALLS),
    (TOOL_CALLS, f"<tool_calls>\n{F}\n{G}\n</tool_calls>", "", CALLS),
    (COHERE, ACTION, "", CALLS),
    # other orders of the fields, fields behind the arguments, arguments as text
    (GRANITE, '<|tool_call|>[{"arguments": {"x": 1}, "name": "h"}]', "", [("h", {"x": 1})]),
    (GRANITE, f'<|tool_call|>[{F[:-1]}, "return": "}}"}}, {G}]', "", CALLS),
    (GRANITE, '<|tool_call|>[{"name": "h", "arguments": "{\\"x\\": 1}"}]', "", [("h", {"x": 1})]),
    (GRANITE, '<|tool_call|>[{"name": "h"}]', "", [("h", {})]),
    # no calls, or none from some place on
    (GRANITE, "<|tool_call|> nothing", "<|tool_call|> nothing", []),
    (GRANITE, "<|tool_call|>[]", "<|tool_call|>[]", []),
    (GRANITE, '<|tool_call|>[{"nom": 1}]', '<|tool_call|>[{"nom": 1}]', []),
    (GRANITE, f"<|tool_call|>[{F}, [1]]", ", [1]]", CALLS[:1]),
    (GRANITE, '<|tool_call|>[{"name": "h", "arguments": {x}}]', '<|tool_call|>[{"name": "h", "arguments": {x}}]', []),
    (GRANITE, "<|tool_call|>", "<|tool_call|>", []),
    (GRANITE, '<|tool_call|>[{"name": "h", "argu', '<|tool_call|>[{"name": "h", "argu', []),
    (FUNCTOOLS, "functools[x] is Python", "functools[x] is Python", []),
]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "f", "arguments": {"a": [' + "[1], " * 500 + '{"b": "]]"}]}}]',
        '[{"name": "f", "arguments": {"a": x}}' + ", {}" * 500 + "]",
    ],
)
def test_lists_without_an_end_are_not_read_again(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    decoder = json.JSONDecoder()

    class Counted:
        def raw_decode(self, text: str, at: int = 0) -> tuple[Any, int]:
            reads.append(len(text))
            return decoder.raw_decode(text, at)

    monkeypatch.setattr(strict_json, "WITHOUT_CONSTANTS", Counted())
    reader = ListedCalls("[TOOL_CALLS]")
    for char in text:
        list(reader.feed(char, False))
    assert reads == [len(text)]


@pytest.mark.parametrize(("format_", "text", "content", "calls"), LISTS)
def test_lists_of_calls(format_: ToolFormat, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    for size in range(1, len(text) + 1):
        message = read(text, OutputFormat(None, False, format_), size)
        got = [(call["name"], json.loads(call["arguments"])) for call in message.calls]
        assert (message.content, got) == (content, calls), f"pieces of {size} characters"
    assert len({call["id"] for call in message.calls}) == len(calls), "numbers of the model are no ids"


def invoke(prefix: str = "", end: str = "", **values: str) -> str:
    pairs = (f'<{prefix}parameter name="{k}"{end}>{v}</{prefix}parameter>\n' for k, v in values.items())
    return f'<{prefix}invoke name="write">\n{"".join(pairs)}</{prefix}invoke>\n'


def minimax(*calls: str) -> str:
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


VALUES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {}),
    ({"path": "a.html", "content": "<p>if a < b && c <= d </p></param <<"}, {}),
    ({"path": '"quoted"\\\t\né\n', "content": '{"a": 1}'}, {}),
    ({"path": "42", "content": "null", "lines": "[1, 2]", "mode": "w"}, {"content": None, "lines": [1, 2]}),
    ({"unknown": "42", "other": "x"}, {"unknown": 42}),
]


@pytest.mark.parametrize(("given", "meant"), VALUES)
def test_values_have_the_types_of_the_schema(given: dict[str, str], meant: dict[str, Any]) -> None:
    text = minimax(invoke(**given), invoke(path="second"))
    if "path" in given:
        assert accepts(call_grammar(MINIMAX, [WRITE], several=True), text)
    assert not accepts(call_grammar(MINIMAX, [WRITE], several=False), text)
    for size in range(1, len(text) + 1):
        message = read("Look.\n" + text, OutputFormat(None, False, MINIMAX.knowing([WRITE])), size)
        got = [(call["name"], json.loads(call["arguments"])) for call in message.calls]
        assert (message.content, got) == ("Look.\n", [("write", given | meant), ("write", {"path": "second"})]), size


def test_values_without_a_schema() -> None:
    (call,) = read(minimax(invoke(a="1", b="x", c="[")), OutputFormat(None, False, MINIMAX), 5).calls
    assert json.loads(call["arguments"]) == {"a": 1, "b": "x", "c": "["}


def test_other_values_follow_their_schema() -> None:
    source = call_grammar(MINIMAX, [WRITE], several=False)
    assert accepts(source, minimax(invoke(path="a", lines="[1]")))
    assert not accepts(source, minimax(invoke(path="a", lines='["x"]')))
    assert not accepts(source, minimax(invoke(path="a", mode="r")))
    assert not accepts(source, minimax(invoke(content="no path")))
    assert not accepts(source, minimax(invoke(path="a")).replace("write", "read"))


def test_an_attribute_says_what_is_a_string() -> None:
    inside = '<｜DSML｜parameter name="a" string="{}">{}</｜DSML｜parameter>\n'
    pairs = inside.format("true", "1").replace('"a"', '"path"') + inside.format("false", "[1, 2]")
    call = f'<｜DSML｜invoke name="write">\n{pairs}</｜DSML｜invoke>\n'
    text = f"<｜DSML｜function_calls>\n{call}{call}</｜DSML｜function_calls>"
    for size in range(1, len(text) + 1):
        message = read(text, OutputFormat(None, False, DEEPSEEK_DSML.knowing([WRITE])), size)
        assert [json.loads(c["arguments"]) for c in message.calls] == [{"path": "1", "a": [1, 2]}] * 2
        assert message.content == ""
    typed = text.replace('"a"', '"lines"')
    assert accepts(call_grammar(DEEPSEEK_DSML, [WRITE], several=True), typed)
    assert not accepts(call_grammar(DEEPSEEK_DSML, [WRITE], several=True), typed.replace('"true"', '"false"'))


CUT = minimax(invoke(path="a"))
NO_INVOKES = [
    (minimax(), minimax(), []),
    (minimax("text"), minimax("text"), []),
    (minimax('{"name": "f"}'), minimax('{"name": "f"}'), []),
    (minimax("<invoke name=write>"), minimax("<invoke name=write>"), []),
    (minimax('<invoke name="write">words</invoke>'), minimax('<invoke name="write">words</invoke>'), []),
    ('<minimax:tool_call>\n<invoke name="wri', '<minimax:tool_call>\n<invoke name="wri', []),
    ('<minimax:tool_call>\n<invoke name="write">\n<par', '<minimax:tool_call>\n<invoke name="write">\n<par', []),
    (CUT.partition("</invoke>")[0], "", ['{"path": "a"']),
    (CUT.partition("</par")[0], "", ['{"path": "a']),
    (CUT.partition("</minimax")[0], "", ['{"path": "a"}']),
    (CUT.partition("</invoke>")[0] + '<parameter name="t', "", ['{"path": "a"']),
    (CUT.partition("</invoke>")[0] + "</inv", "", ['{"path": "a"']),
    (CUT.partition("</minimax")[0] + '\n<invoke name="wri', "", ['{"path": "a"}']),
    (minimax(invoke(path="a"), "words"), "words</minimax:tool_call>", ['{"path": "a"}']),
    ("<minimax:tool_call><invoke " + "a" * 600, "<minimax:tool_call><invoke " + "a" * 600, []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "arguments"), NO_INVOKES)
def test_what_is_no_call_is_text(text: str, content: str, arguments: list[str]) -> None:
    for size in range(1, len(text) + 1):
        message = read(text, OutputFormat(None, False, MINIMAX.knowing([WRITE])), size)
        got = message.content.strip(), [call["arguments"] for call in message.calls]
        assert got == (content, arguments), f"pieces of {size} characters"


MARKED = [
    (MINIMAX, CUT, "</minimax:tool_call>"),
    (TOOL_CALLS, '<tool_calls>[{"name": "f", "arguments": {"path": "a"}}]</tool_calls>', "</tool_calls>"),
    (COHERE, ACTION, "<|END_ACTION|>"),
    (DEEPSEEK_PLAIN, DEEPSEEK_TEXT, "<｜tool▁calls▁end｜>"),
]


@pytest.mark.parametrize(("format_", "text", "closing"), MARKED)
def test_a_closing_marker_that_a_limit_cuts_off_is_no_text(format_: ToolFormat, text: str, closing: str) -> None:
    assert text.endswith(closing)
    whole = [call["arguments"] for call in read(text, OutputFormat(None, False, format_), 9).calls]
    for n_left in range(len(closing)):
        message = read(text[: len(text) - len(closing) + n_left], OutputFormat(None, False, format_), 9)
        assert (message.content.strip(), [call["arguments"] for call in message.calls]) == ("", whole)


def deltas(text: str, format_: ToolFormat) -> list[str]:
    reader = OutputFormat(None, False, format_.knowing([WRITE])).reader()
    return [delta.text for char in text for delta in reader.feed(char) if delta.kind == "tool" and delta.text]


def test_arguments_are_given_out_as_they_come() -> None:
    """A file that a model writes is seen while it is written."""
    content = "word " * 40
    listed = json.dumps([{"name": "write", "arguments": {"path": content}}])
    for format_, text in (
        (MINIMAX, minimax(invoke(path=content))),
        (GRANITE, f"<|tool_call|>{listed}"),
        (PHI, f"<|tool_call|>{listed}<|/tool_call|>"),
        (COHERE, f"<|START_ACTION|>{listed}<|END_ACTION|>"),
    ):
        pieces = deltas(text, format_)
        assert json.loads("".join(pieces)) == {"path": content}
        assert len(pieces) > 100 and max(map(len, pieces)) < 20, format_.name


def test_long_heads_and_names_without_end() -> None:
    name = "n" * 600
    text = f'<|tool_call|>[{{"name": "{name}", "arguments": {{"a": 1}}}}]'
    for size in (1, 7, 1000):
        (call,) = read(text, OutputFormat(None, False, GRANITE), size).calls
        assert (call["name"], call["arguments"]) == (name, '{"a": 1}'), f"pieces of {size} characters"
    endless = '<|tool_call|>[{"name": "' + "n" * 200_000
    began = time.perf_counter()
    assert read(endless, OutputFormat(None, False, GRANITE), 2).content == endless
    assert time.perf_counter() - began < 60, "looking for the head in all of it with every piece would take minutes"


NO_JSON = '{"x": NaN, "y": [-Infinity, "NaN", -1e-5, Infinity], "z": true}'
NUMBERS: list[tuple[ToolFormat, str]] = [
    (GRANITE, f'<|tool_call|>[{{"name": "f", "arguments": {NO_JSON}}}]'),
    (GRANITE, f'<|tool_call|>[{{"arguments": {NO_JSON}, "name": "f"}}]'),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {NO_JSON}}}</tool_call>'),
    (HERMES, f'<tool_call>{{"arguments": {NO_JSON}, "name": "f"}}</tool_call>'),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "f", "arguments": {NO_JSON}}}]'),
    (MISTRAL_ARGS, f"[TOOL_CALLS]f[ARGS]{NO_JSON}"),
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{NO_JSON}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        DEEPSEEK_PLAIN,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{NO_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
]


@pytest.mark.parametrize(("format_", "text"), NUMBERS, ids=lambda value: getattr(value, "name", ""))
def test_numbers_that_json_has_no_word_for_are_null(format_: ToolFormat, text: str) -> None:
    def refused(word: str) -> None:
        raise AssertionError(word)

    for size in range(1, len(text) + 1):
        (call,) = read(text, OutputFormat(None, False, format_), size).calls
        found = json.loads(call["arguments"], parse_constant=refused)
        assert found == {"x": None, "y": [None, "NaN", -1e-5, None], "z": True}, f"pieces of {size} characters"


SEEDS = [
    (PHI, f"Hi <|tool_call|>[{F}, {G}]<|/tool_call|> end"),
    (COHERE, f"<|START_THINKING|>plan<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>{ACTION} end"),
    (MINIMAX, "Hi " + minimax(invoke(path="a", lines="[1]", content="x"), invoke(path="b")) + " end"),
]


@pytest.mark.parametrize(("format_", "text"), SEEDS, ids=lambda value: getattr(value, "name", ""))
def test_damaged_texts_are_read_alike_in_all_pieces(format_: ToolFormat, text: str) -> None:
    chance = random.Random(7)
    output = OutputFormat(
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        False,
        format_.knowing([WRITE]),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    )
    for _ in range(400):
        at, n = chance.randrange(len(text)), chance.randrange(12)
        damaged = text[:at] + chance.choice(["", "}", "]", '"', "<", " ", text[:n]]) + text[at + n :]
        readings = set()
        for size in (1, 2, 3, 5, 11, 1000):
            message = read(damaged, output, size)
            calls = tuple((call["name"], call["arguments"]) for call in message.calls)
            readings.add((message.content, message.reasoning, calls))
        assert len(readings) == 1, damaged


THINKING, RESPONSE = ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
ANSWERS = [
    ("<|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hello.", "", 0),
    ("Hello.", "Hello.", "", 0),
    ("Hello.<|END_RESPONSE|>", "Hello.<|END_RESPONSE|>", "", 0),
    ("<|START_THINKING|>Plan.<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hello.", "Plan.", 0),
    (f"<|START_THINKING|>Plan.<|END_THINKING|>{ACTION}", "", "Plan.", 2),
    (f"<|START_RESPONSE|>I look.<|END_RESPONSE|>{ACTION}", "I look.", "", 2),
    ("<|START_RESPONSE|>a <|END_RESPONSE|> b<|END_RESPONSE|>\n", "a <|END_RESPONSE|> b", "", 0),
    ("<|START_RESPONSE|>cut", "cut", "", 0),
    ("<|START_RESPONSE|>cut<|END_RES", "cut<|END_RES", "", 0),
    ("<|START_RES", "<|START_RES", "", 0),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "n_calls"), ANSWERS)
def test_tags_around_answers(text: str, content: str, reasoning: str, n_calls: int) -> None:
    output = OutputFormat(THINKING, False, COHERE, answer=RESPONSE)
    for size in range(1, len(text) + 1):
        message = read(text, output, size)
        assert (message.content, message.reasoning, len(message.calls)) == (content, reasoning, n_calls), size


def test_tags_around_answers_with_markup() -> None:
    text = "<think>hm</think><response>Write <response>x</response> in XML.</response>"
    message = read(text, OutputFormat(("<think>", "</think>"), False, None, answer=("<response>", "</response>")), 3)
    assert (message.reasoning, message.content) == ("hm", "Write <response>x</response> in XML.")
