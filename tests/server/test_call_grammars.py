"""Grammars of tool calls: what they allow, and when lazy ones begin to hold."""

from __future__ import annotations

import json

import pytest

from ikpy.engine.grammars.gbnf import parse_gbnf
from ikpy.engine.grammars.grammar import TokenTexts, gbnf_grammar
from ikpy.engine.grammars.lazy_grammar import LazyGrammar, Trigger
from ikpy.server.chat.call_grammar import call_grammar
from ikpy.server.chat.gemma_calls import GEMMA
from ikpy.server.chat.harmony import HARMONY
from ikpy.server.chat.invoked_calls import DEEPSEEK_DSML, DEEPSEEK_V4, MINIMAX
from ikpy.server.chat.output import OutputFormat
from ikpy.server.chat.recipients import RECIPIENTS
from ikpy.server.chat.streamed_lists import COHERE, FUNCTOOLS, GRANITE, NEMOTRON, PHI, TOOL_CALLS
from ikpy.server.chat.tagged_values import CODER, GLM, SEED
from ikpy.server.chat.tool_blocks import DEEPSEEK, DEEPSEEK_PLAIN, KIMI, LLAMA, SOLAR
from ikpy.server.chat.tool_formats import FUNCTIONARY, GIGACHAT, HERMES, MISTRAL, MISTRAL_ARGS
from ikpy.server.chat.tool_reading import ToolFormat
from tests.server.test_output import read

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
BYTES = TokenTexts([bytes([i]) for i in range(256)], special=(), eog=(0,))
WEATHER_CALLS = [
    (
        CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    (
        SEED,
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
    ),
    (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
    (MISTRAL, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]'),
    (MISTRAL, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}, "id": "a1B2c3D4e"}]'),
    (MISTRAL_ARGS, '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}'),
    (MISTRAL_ARGS, '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}'),
    (LLAMA, '{"name": "get_weather", "parameters": {"city": "Rome"}}'),
    (FUNCTIONARY, '<function=get_weather>{"city": "Rome"}</function>'),
    (
        SOLAR,
        "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>"
        '{"city": "Rome"}<|tool_call:end|>',
    ),
    (RECIPIENTS, '>>>get_weather\n{"city": "Rome"}'),
    (GIGACHAT, '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Rome"}}'),
    (GLM, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"),
    (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        DEEPSEEK_PLAIN,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
    ),
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    (
        DEEPSEEK_DSML,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        DEEPSEEK_V4,
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    (GRANITE, '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]'),
    (PHI, '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]<|/tool_call|>'),
    (PHI, '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Rome"}}<|/tool_call|>'),
    (FUNCTOOLS, 'functools[{"name": "get_weather", "arguments": {"city": "Rome"}}]'),
    (NEMOTRON, '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</TOOLCALL>'),
    (TOOL_CALLS, '<tool_calls>[\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n]</tool_calls>'),
    (
        COHERE,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Rome"}}\n'
        "]<|END_ACTION|>",
    ),
    (HARMONY, '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'),
    (HARMONY, '<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Rome"}'),
    (HARMONY, '<|channel|>commentary to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}'),
    (HARMONY, '<|channel|>commentary to=functions.get_weather <|constrain|> json<|message|>{"city": "Rome"}'),
    (GEMMA, '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'),
    (GEMMA, '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>'),
]


@pytest.mark.parametrize(("format_", "text"), WEATHER_CALLS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.parametrize("lazy", [False, True], ids=["forced", "begun"])
def test_call_grammars_allow_what_the_readers_read_and_nothing_else(format_: ToolFormat, text: str, lazy: bool) -> None:
    source = call_grammar(format_, [WEATHER, {"name": "other"}], several=False, lazy=lazy)
    parse_gbnf(source)
    start = text.index(format_.trigger or format_.opening) + len(format_.trigger or format_.opening) if lazy else 0
    grammar = gbnf_grammar(source, BYTES)
    for i, byte in enumerate(text.encode()[len(text[:start].encode()) :]):
        assert grammar.allows(byte), f"{format_.name}: byte {i} of {text[start:]!r}"
        grammar.accept(byte)
    assert grammar.complete
    wrong = text.replace("get_weather", "get_money").encode()[len(text[:start].encode()) :]
    grammar = gbnf_grammar(source, BYTES)
    assert not all(grammar.allows(byte) and grammar.accept(byte) is None for byte in wrong)
    harmony = format_ is HARMONY
    message = read(text, OutputFormat(None, False, format_, harmony=harmony), 3)
    assert [call["name"] for call in message.calls] == ["get_weather"]
    assert json.loads(message.calls[0]["arguments"])["city"] == "Rome"


def test_several_calls_only_if_wanted() -> None:
    for format_, text in WEATHER_CALLS[:2]:
        for several in (False, True):
            grammar = gbnf_grammar(call_grammar(format_, [WEATHER], several=several), BYTES)
            allowed = [grammar.allows(byte) and grammar.accept(byte) is None for byte in (text + "\n" + text).encode()]
            assert all(allowed) == several


LISTS = [(GRANITE, "{}"), (PHI, "{}<|/tool_call|>"), (FUNCTOOLS, "{}"), (NEMOTRON, "{}</TOOLCALL>"), (MISTRAL, "{}")]


@pytest.mark.parametrize(("format_", "form"), LISTS, ids=lambda value: getattr(value, "name", ""))
def test_calls_of_a_list_have_commas_between_them(format_: ToolFormat, form: str) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    for separator in (", ", ",\n    ", "", "\n"):
        text = format_.opening.removesuffix("[") + form.format(f"[{call}{separator}{call}]")
        grammar = gbnf_grammar(call_grammar(format_, [WEATHER], several=True), BYTES)
        allowed = all(grammar.allows(byte) and grammar.accept(byte) is None for byte in text.encode())
        wanted = separator == ", " or (separator == ",\n    " and format_ is not MISTRAL)
        assert allowed == wanted, (format_.name, separator)
        if allowed:
            assert grammar.complete
            assert len(read(text, OutputFormat(None, False, format_), 3).calls) == 2


def lazy_grammar(source: str, trigger: Trigger) -> LazyGrammar:
    pieces = [bytes([i]) for i in range(256)] + [b"<T>", b"x<T>a", b"x<T>z"]
    texts = TokenTexts(pieces, special=(256,), eog=(0,))
    return LazyGrammar(gbnf_grammar(source, texts), trigger, texts, lambda token: pieces[token])


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "@{x}"}}\n</tool_call>'),
        (GLM, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>@{x}</arg_value>\n</tool_call>"),
    ],
)
def test_values_that_look_like_markers_are_texts(format_: ToolFormat, text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": ["@{x}"]}}, "required": ["a"]}
    grammar = gbnf_grammar(call_grammar(format_, [{"name": "f", "parameters": schema}], several=False), BYTES)
    assert all(grammar.allows(byte) and grammar.accept(byte) is None for byte in text.encode())
    assert grammar.complete


def test_a_lazy_grammar_holds_behind_its_marker() -> None:
    grammar = lazy_grammar('root ::= "abc"', Trigger("<T>"))
    for byte in b"zz<":
        assert grammar.allows(byte)
        grammar.accept(byte)
    assert not grammar.active and grammar.mask().all()
    grammar.accept(256)
    assert grammar.active and grammar.allows(ord("a")) and not grammar.allows(ord("z"))
    assert grammar.mask().nonzero()[0].tolist() == [ord("a")]
    grammar.reset()
    grammar.accept(257)
    assert grammar.active and grammar.allows(ord("b")) and not grammar.allows(ord("a"))
    grammar.reset()
    grammar.accept(258)
    assert not grammar.active and grammar.allows(ord("z")), "what contradicts the grammar cannot be taken back"


def test_a_lazy_grammar_ignores_markers_inside_reasoning() -> None:
    grammar = lazy_grammar('root ::= "abc"', Trigger("<T>", ("<think>", "</think>")))
    for byte in b"<think>a <T> b</think> c":
        grammar.accept(byte)
    assert not grammar.active
    grammar.accept(256)
    assert grammar.active
    inside = lazy_grammar('root ::= "abc"', Trigger("<T>", ("<think>", "</think>"), inside=True))
    inside.accept(256)
    assert not inside.active


def test_a_lazy_grammar_ignores_markers_inside_any_message_of_a_channel() -> None:
    trigger = Trigger(" to=f.", ("<|message|>", "<|start|>"), again=True)
    grammar = lazy_grammar('root ::= "abc"', trigger)
    for byte in b"<|channel|>analysis<|message|>I write to=f.x now<|end|>":
        grammar.accept(byte)
    assert not grammar.active
    for byte in b"<|start|>assistant<|channel|>commentary to=f.":
        grammar.accept(byte)
    assert grammar.active
    inside = lazy_grammar('root ::= "abc"', Trigger(" to=f.", ("<|message|>", "<|start|>"), True, True))
    for byte in b"I write to=f.x<|end|><|start|>assistant to=f.":
        assert not inside.active
        inside.accept(byte)
    assert inside.active
