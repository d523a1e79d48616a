"""Answers that a limit ends in the middle of a call: nothing of it is shown as text, in whatever pieces it came."""

from __future__ import annotations

import json
import shlex

import pytest

from ikpy.server.chat.gemma_calls import GEMMA
from ikpy.server.chat.harmony import HARMONY
from ikpy.server.chat.invoked_calls import DEEPSEEK_DSML, DEEPSEEK_V4, DSML, GCML, GIGACHAT_GCML, MINIMAX
from ikpy.server.chat.output import ChatMessage, OutputFormat
from ikpy.server.chat.python_calls import LFM2
from ikpy.server.chat.recipients import NO_CALLS, RECIPIENTS
from ikpy.server.chat.streamed_lists import COHERE, FUNCTOOLS, GRANITE, NEMOTRON, PHI, TOOL_CALLS
from ikpy.server.chat.tagged_values import CODER, GLM, SEED
from ikpy.server.chat.tags import answer_tags, reasoning_tags
from ikpy.server.chat.tool_blocks import DEEPSEEK, DEEPSEEK_PLAIN, KIMI, LLAMA, SOLAR
from ikpy.server.chat.tool_formats import FUNCTIONARY, GIGACHAT, HERMES, MISTRAL, MISTRAL_ARGS, SIGNS, tool_format
from ikpy.server.chat.tool_reading import ToolFormat
from tests.server.harness import running

WRITE = {"name": "write", "parameters": {"properties": {"path": {"type": "string"}, "lines": {"type": "array"}}}}
ARGUMENTS = '{"path": "a b", "lines": [1, 2]}'
OBJECT = f'{{"name": "write", "arguments": {ARGUMENTS}}}'
BACKWARDS = f'{{"arguments": {ARGUMENTS}, "name": "write"}}'


def invoke(prefix: str, text: str = "", other: str = "") -> str:
    path = f'<{prefix}parameter name="path"{text}>a b</{prefix}parameter>'
    lines = f'<{prefix}parameter name="lines"{other}>[1, 2]</{prefix}parameter>'
    return f'<{prefix}invoke name="write">\n{path}\n{lines}\n</{prefix}invoke>\n'


def tagged(tag: str, gap: str) -> str:
    path = f"<parameter=path>{gap}a b{gap}</parameter>\n"
    lines = f"<parameter=lines>{gap}[1, 2]{gap}</parameter>\n"
    return f"<{tag}>\n<function=write>\n{path}{lines}</function>\n</{tag}>"


KIMI_CALL = f"<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
KIMI_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
SOLAR_CALL = f"<|tool_call:begin|>a1b2<|tool_call:name|>write<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
IN_BLOCK = DEEPSEEK_CALL.format(f"function<｜tool▁sep｜>write\n```json\n{ARGUMENTS}\n```")
PLAIN = DEEPSEEK_CALL.format(f"write<｜tool▁sep｜>{ARGUMENTS}")
DSML_CALL, GCML_CALL = (invoke(prefix, ' string="true"', ' string="false"') for prefix in (DSML, GCML))
GLM_CALL = (
    "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a b</arg_value>\n"
    "<arg_key>lines</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>"
)
COHERE_CALL = f'{{"tool_call_id": "0", "tool_name": "write", "parameters": {ARGUMENTS}}}'
HARMONY_CALL = f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
CALLS: list[tuple[ToolFormat, str]] = [
    (HERMES, f"<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{OBJECT}\n</tool_call>"),
    (HERMES, f"<tool_call>\n{BACKWARDS}\n</tool_call>"),
    (MISTRAL, f'[TOOL_CALLS] [{OBJECT[:-1]}, "id": "abcdefghi"}}, {OBJECT}]'),
    (MISTRAL_ARGS, f"[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}[TOOL_CALLS]write[ARGS]{ARGUMENTS}"),
    (LLAMA, f'{{"name": "write", "parameters": {ARGUMENTS}}}'),
    (LLAMA, f'{{"type": "function", "name": "write", "parameters": {ARGUMENTS}}}'),
    (DEEPSEEK, (IN_BLOCK * 2).join(DEEPSEEK_SECTION)),
    (DEEPSEEK_PLAIN, (PLAIN * 2).join(DEEPSEEK_SECTION)),
    (DEEPSEEK_DSML, f"<{DSML}function_calls>\n{DSML_CALL * 2}</{DSML}function_calls>"),
    (DEEPSEEK_V4, f"<{DSML}tool_calls>\n{DSML_CALL * 2}</{DSML}tool_calls>"),
    (GIGACHAT_GCML, f"<{GCML}tool_calls>\n{GCML_CALL * 2}</{GCML}tool_calls>"),
    (MINIMAX, f"<minimax:tool_call>\n{invoke('') * 2}</minimax:tool_call>"),
    (COHERE, f"<|START_ACTION|>[\n    {COHERE_CALL},\n    {COHERE_CALL}\n]<|END_ACTION|>"),
    (GRANITE, f"<|tool_call|>[{OBJECT}, {BACKWARDS}]"),
    (PHI, f"<|tool_call|>[{OBJECT}, {OBJECT}]<|/tool_call|>"),
    (FUNCTOOLS, f"functools[{OBJECT}, {OBJECT}]"),
    (FUNCTOOLS, f" functools[{OBJECT}, {OBJECT}]"),
    (FUNCTIONARY, f"<function=write>{ARGUMENTS}</function>\n<function=write>{ARGUMENTS}</function>"),
    (RECIPIENTS, f">>>write\n{ARGUMENTS}\n>>>write\n{ARGUMENTS}"),
    (GIGACHAT, f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}<|message_sep|>"),
    (NEMOTRON, f"<TOOLCALL>[{OBJECT}, {OBJECT}]</TOOLCALL>"),
    (TOOL_CALLS, f"<tool_calls>\n{OBJECT}\n{OBJECT}\n</tool_calls>"),
    (SOLAR, f"<|tool_calls|>{SOLAR_CALL * 2}"),
    (KIMI, (KIMI_CALL * 2).join(KIMI_SECTION)),
    (GLM, f"{GLM_CALL}\n{GLM_CALL}"),
    (CODER, tagged("tool_call", "\n")),
    (SEED, tagged("seed:tool_call", "")),
    (GEMMA, '<|tool_call>call:write{lines:[1,2],path:<|"|>a b<|"|>}<tool_call|>' * 2),
    (LFM2, "<|tool_call_start|>[write(path='a b', lines=[1, 2]), write('a b', [1, 2])]<|tool_call_end|>"),
    (HARMONY, f"{HARMONY_CALL}<|start|>assistant{HARMONY_CALL}"),
]


def read(text: str, output: OutputFormat, size: int, *, cut: bool, stop: str = "") -> ChatMessage:
    reader, message = output.reader(), ChatMessage()
    deltas = [delta for at in range(0, len(text), size) for delta in reader.feed(text[at : at + size])]
    for delta in [*deltas, *reader.finish(cut=cut, stop=stop)]:
        assert delta.text or delta.name is not None
        message.add(delta)
    return message


def output_of(format_: ToolFormat) -> OutputFormat:
    return OutputFormat(None, False, format_.knowing([WRITE]), harmony=format_ is HARMONY)


def test_every_format_is_cut() -> None:
    assert {format_.name for format_, _ in CALLS} >= {format_.name for format_, _ in SIGNS}


@pytest.mark.parametrize(("format_", "call"), CALLS, ids=lambda value: getattr(value, "name", ""))
def test_no_part_of_a_call_is_text(format_: ToolFormat, call: str) -> None:
    output = output_of(format_)
    whole = [c["arguments"] for c in read(call, output, len(call), cut=True).calls]
    for n in range(len(call)):
        text = f"Hi. {call[:n]}"
        messages = [read(text, output, size, cut=True) for size in (1, 3, 7, len(text))]
        found = {(m.content, *((c["name"], c["arguments"]) for c in m.calls)) for m in messages}
        assert len(found) == 1, f"another reading in other pieces: {text}"
        content, *calls = found.pop()
        # One character, or the beginning of a word, may be text.
        word = call[:n].strip() if format_ is FUNCTOOLS and "[" not in call[:n] else ""
        allowed = {"", call[0], word}
        assert content.removeprefix("Hi.").strip() in allowed, text
        assert all(name == "write" for name, _ in calls), text
        assert [arguments for _, arguments in calls[:-1]] == whole[: max(0, len(calls) - 1)]


def test_a_list_that_the_model_does_not_close_holds_its_calls() -> None:
    text = f"[TOOL_CALLS][{OBJECT}, {OBJECT}"
    for size in (1, 7, len(text)):
        message = read(text, output_of(MISTRAL), size, cut=False)
        assert (message.content, [c["arguments"] for c in message.calls]) == ("", [ARGUMENTS] * 2)


@pytest.mark.parametrize(("format_", "call"), CALLS, ids=lambda value: getattr(value, "name", ""))
def test_what_the_model_ends_itself_is_text(format_: ToolFormat, call: str) -> None:
    if format_ is not HARMONY:
        text = f"Hi. {format_.opening} no call"
        assert read(text, output_of(format_), 3, cut=False).content.split() == text.split()


ENDS = [
    (GLM, GLM_CALL, ("</tool_call>", "</tool", "</", "\n</tool_call>")),
    (CODER, tagged("tool_call", "\n"), ("</tool_call>", "</tool", "</function>", "</function>\n</tool_call>")),
    (SEED, tagged("seed:tool_call", ""), ("</seed:tool_call>", "</seed", "</function>")),
    (GEMMA, '<|tool_call>call:write{lines:[1,2],path:<|"|>a b<|"|>}<tool_call|>', ("<tool_call|>", "<tool")),
    (KIMI, KIMI_CALL.join(KIMI_SECTION), (KIMI_SECTION[1], "<|tool_call_end|>")),
    (SOLAR, f"<|tool_calls|>{SOLAR_CALL}", ("<|tool_call:end|>",)),
    (DEEPSEEK, IN_BLOCK.join(DEEPSEEK_SECTION), (DEEPSEEK_SECTION[1], "<｜tool▁call▁end｜>")),
    (MINIMAX, f"<minimax:tool_call>\n{invoke('')}</minimax:tool_call>", ("</minimax:tool_call>", "</invoke>")),
    (
        LFM2,
        "<|tool_call_start|>[write(path='a b', lines=[1, 2])]<|tool_call_end|>",
        ("<|tool_call_end|>", "<|tool", ")]"),
    ),
    (HERMES, f"<tool_call>\n{OBJECT}\n</tool_call>", ("</tool_call>", "\n</")),
]
"""A call, and stop strings that end an answer where nothing of it is missing but the end."""


@pytest.mark.parametrize(("format_", "call", "stops"), ENDS, ids=lambda value: getattr(value, "name", ""))
def test_stop_strings_that_are_the_end_of_a_call(format_: ToolFormat, call: str, stops: tuple[str, ...]) -> None:
    for stop in stops:
        text = f"Hi. {call[: call.rindex(stop)]}"
        for size in (1, 3, len(text)):
            message = read(text, output_of(format_), size, cut=False, stop=stop)
            calls = [(c["name"], json.loads(c["arguments"])) for c in message.calls]
            assert (message.content.strip(), calls) == ("Hi.", [("write", json.loads(ARGUMENTS))]), stop


@pytest.mark.parametrize("format_", [GLM, CODER, SEED], ids=lambda value: value.name)
def test_other_stop_strings_make_no_calls(format_: ToolFormat) -> None:
    """Nothing says that a call without its later parameters is the one that was meant."""
    call = next(call for f, call in CALLS if f is format_).split("</tool_call>")[0]
    for n in range(call.index("write"), call.rindex("</function>") if "</function>" in call else len(call)):
        for stop in ("\n", "<", "<arg_key>", "<parameter=", call[n : n + 4]):
            message = read(f"Hi. {call[:n]}", output_of(format_), 3, cut=False, stop=stop)
            assert (message.content.split(), message.calls) == (f"Hi. {call[:n]}".split(), []), (n, stop)


@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "age": 4', '{"name": "Bob", "parents', '{"name": 5', '{ "name": ["a"']
)
def test_objects_that_are_no_calls_stay_text_when_they_are_cut(text: str) -> None:
    for size in range(1, len(text) + 1):
        message = read(text, output_of(LLAMA), size, cut=True)
        assert (message.content, message.calls) == (text, [])


RECIPIENT_CASES = [
    ("all\nHello.", "Hello.", 0),
    (">>>all\nHello.", "Hello.", 0),
    (f"write\n{ARGUMENTS}", "", 1),
    (f"all\nI look.>>>write\n{ARGUMENTS}\n>>>write\n{ARGUMENTS}", "I look.", 2),
    ("all\n>>> 1 + 1\n2", ">>> 1 + 1\n2", 0),
    ('{"a": 1}', '{"a": 1}', 0),
    ("write\nno arguments", "write\nno arguments", 0),
]


@pytest.mark.parametrize(("text", "content", "n_calls"), RECIPIENT_CASES)
def test_recipients_of_parts(text: str, content: str, n_calls: int) -> None:
    for size in range(1, len(text) + 1):
        message = read(text, OutputFormat(tools=RECIPIENTS, opened=True), size, cut=False)
        assert (message.content.strip(), len(message.calls)) == (content, n_calls), f"pieces of {size} characters"
        assert all(call["arguments"] == ARGUMENTS for call in message.calls)
        if not n_calls:
            assert read(text, OutputFormat(tools=NO_CALLS, opened=True), size, cut=False).content.strip() == content


SOLAR_ANSWERS = [
    ("<|content|>Hello.", "Hello.", "", 0),
    ("<|think|>Plan.<|end|><|begin|>assistant<|content|>Hello.", "Hello.", "Plan.", 0),
    (f"<|think|>Plan.<|end|><|begin|>assistant<|tool_calls|>{SOLAR_CALL}", "", "Plan.", 1),
    (f"<|content|>I look.<|end|><|begin|>assistant<|tool_calls|>{SOLAR_CALL * 2}", "I look.", "", 2),
    (f"<|tool_calls|>{SOLAR_CALL}", "", "", 1),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "n_calls"), SOLAR_ANSWERS)
def test_parts_of_solar_answers(text: str, content: str, reasoning: str, n_calls: int) -> None:
    source = "{{ tools }}<|begin|>assistant<|think|><|tool_calls|><|tool_call:begin|>"
    output = OutputFormat(reasoning_tags(source), False, tool_format(source), answer=answer_tags(source))
    for size in range(1, len(text) + 1):
        message = read(text, output, size, cut=False)
        found = message.content, message.reasoning, [(c["id"], c["name"]) for c in message.calls]
        assert found == (content, reasoning, [("a1b2", "write")] * n_calls), f"pieces of {size} characters"


def test_beginnings_of_markers() -> None:
    output = OutputFormat(("<think>", "</think>"), False, HERMES)
    for text, content in (("a <", "a <"), ("a <tool", "a "), ("<thi", ""), ("<", "<"), ("<think>a</thi", "")):
        message = read(text, output, 1, cut=True)
        assert message.content == content and message.reasoning == ("a" if "k>" in text else "")
        assert read(text, output, 1, cut=False).content == (text if "k>" not in text else "")


def test_the_end_of_a_call_as_a_stop_string_of_requests() -> None:
    template = "{{ tools }}<tool_call><arg_key>{% for m in messages %}{{ m.content }}{% endfor %}"
    function = {"name": "pick", "parameters": {"properties": {"side": {"const": "left"}}, "required": ["side"]}}
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
    chat = asked | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    tool = {"name": "pick", "input_schema": function["parameters"]}
    claude = asked | {"model": "m", "tools": [tool], "tool_choice": {"type": "any"}}
    with running(f"llama-server -m PUPPET -t 1 -c 512 -np 1 --chat-template {shlex.quote(template)}") as client:
        for stream in (False, True):
            for path, body in (
                ("/v1/chat/completions", chat | {"stop": "</tool_call>"}),
                ("/v1/messages", claude | {"stop_sequences": ["</tool_call>"]}),
            ):
                text = client.post(path, json=body | {"stream": stream}).text
                assert "arg_key" not in text and "pick" in text and "left" in text, f"{path}: {text}"
