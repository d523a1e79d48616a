"""Calls of LFM2 in Python's syntax and code of Functionary 3.1: what is read, what may be written, what is shown."""

from __future__ import annotations

import ast
import json
import shlex
import time
from typing import Any

import numpy as np
import pytest

from ikpy.server.chat.call_grammar import call_grammar
from ikpy.server.chat.code_calls import CODE_TAG
from ikpy.server.chat.output import ChatMessage, OutputFormat
from ikpy.server.chat.python_calls import CLOSING, LFM2, OPENING, python_value, text_of
from ikpy.server.chat.rendering import fitted
from ikpy.server.chat.tool_formats import FUNCTIONARY, tool_format
from ikpy.server.chat.tool_reading import ToolFormat
from ikpy.vocab import ChatTemplate
from tests.server.harness import read_events, running
from tests.server.test_tagged_values import accepts
from tests.server.test_tool_templates import CALL, MESSAGES, TOOL
from tests.server.test_tool_templates import FUNCTIONARY as FUNCTIONARY_TEMPLATE

SEARCH = {
    "name": "search",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "exact": {"type": "boolean"},
            "kind": {"enum": ["it's", 'a"b', "c", 4]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "code": {"type": "string", "pattern": "^[a-c]$"},
        },
        "required": ["text"],
    },
}


def read(
    text: str, size: int, format_: ToolFormat = LFM2, *functions: Any, cut: bool = False
) -> tuple[ChatMessage, list[str]]:
    """The answer, and the arguments of its calls as they came."""
    reader, message = OutputFormat(None, False, format_.knowing(functions or [SEARCH])).reader(), ChatMessage()
    deltas = [delta for at in range(0, len(text), size) for delta in reader.feed(text[at : at + size])]
    deltas += reader.finish(cut=cut)
    for delta in deltas:
        message.add(delta)
    return message, [delta.text for delta in deltas if delta.kind == "tool"]


READ: list[tuple[str, dict[str, Any]]] = [
    ("text='a b', n=3", {"text": "a b", "n": 3}),
    ("", {}),
    (' text = "a\\n\\"b\\"\\u00e9\\x41" , n = -1_000 , ', {"text": 'a\n"b"éA', "n": -1000}),
    ("text='it's', n=2", {"text": "it's", "n": 2}),
    ("text='line\nnext', n=1", {"text": "line\nnext", "n": 1}),
    ("text='''a \"'\" ''', n=1", {"text": 'a "\'" ', "n": 1}),
    ("text='', kind=\"\"", {"text": "", "kind": ""}),
    (r"text='C:\Users\dir', kind='\d+\/'", {"text": r"C:\Users\dir", "kind": r"\d+/"}),
    (r"text='\ud83d\ude00'", {"text": "😀"}),
    ("exact=True, tags=['a', None, false]", {"exact": True, "tags": ["a", None, False]}),
    ("tags=[], kind={}, n=(1, 2), code=(1), x=(1,)", {"tags": [], "kind": {}, "n": [1, 2], "code": 1, "x": [1]}),
    ("kind={\"a\": {'b': null}, 3: [1.5e3, .5]}", {"kind": {"a": {"b": None}, "3": [1500.0, 0.5]}}),
    ("'a b', 3", {"text": "a b", "n": 3}),
    ("'a b', exact=True", {"text": "a b", "exact": True}),
    ("text='a)] b(', file-name='x'", {"text": "a)] b(", "file-name": "x"}),
    ("text='[search(n=1)]'", {"text": "[search(n=1)]"}),
    (f"text='end with {CLOSING}', n=3", {"text": f"end with {CLOSING}", "n": 3}),
    (
        f"text='a \"{CLOSING}\"', tags=['{OPENING}', \"it's {CLOSING}'\"]",
        {"text": f'a "{CLOSING}"', "tags": [OPENING, f"it's {CLOSING}'"]},
    ),
]


@pytest.mark.parametrize(("written", "meant"), READ)
def test_arguments(written: str, meant: dict[str, Any]) -> None:
    for text in (f"[search({written})]", f"search({written})", f" [ search( {written} ) , ]\n"):
        answer = f"Hi. {OPENING}{text}{CLOSING} Done."
        for size in (1, 4, len(answer)):
            message, _ = read(answer, size)
            assert message.content.split() == ["Hi.", "Done."], text
            assert [(c["name"], json.loads(c["arguments"])) for c in message.calls] == [("search", meant)]


def test_several_calls_and_json() -> None:
    two = [{"name": "search", "arguments": {"n": 1}}, {"name": "other.f", "arguments": {}}]
    for text in ("[search(n=1), other.f()]", "search(n=1)\nother.f()", "[search(n=1),other.f()", json.dumps(two)):
        message, _ = read(f"{OPENING}{text}{CLOSING}", 3)
        assert [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in message.calls] == two, text
        assert message.content == ""
    message, _ = read(f"{OPENING}{json.dumps(two[0])}{CLOSING}", 3)
    assert len(message.calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        *("[search(f())]", "[search(n=a)]", "[search(n=1+1)]", "[search(n=)]", "[search(n=1, n=2)]", "[search(1 2)]"),
        *("[search(n=0x)]", "[search(n=1j)]", "[search(n=1e999)]", "[search(**{})]", "search", "[]", "", "[1]", "{}"),
        *("[search(text='a)]", "[search(n={[]: 1})]", "[search(n={1})]", f"[search(n={'9' * 5000})]"),
        *(f"[search(n=0x{'f' * 5000})]", f"[search(n={'[' * 200}{']' * 200})]", "[__import__('os').system('x')]"),
        *("[lambda: 1]", "[search(n=search())]", "[other('a')]", '[{"n": 1}]', "[search(text=f'{n}')]"),
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    answer = f"Hi. {OPENING}{text}{CLOSING}"
    for size in (1, 5, len(answer)):
        message, _ = read(answer, size)
        assert (message.content, message.calls) == (answer, [])


def test_markers_within_texts_of_json_are_text() -> None:
    arguments = {"text": f'say "{CLOSING}"', "n": 1}
    text = json.dumps([{"name": "search", "arguments": arguments}])
    for size in (1, 4, 1000):
        message, _ = read(f"{OPENING}{text}{CLOSING} Done.", size)
        assert [json.loads(c["arguments"]) for c in message.calls] == [arguments]
        assert message.content.strip() == "Done."


def test_a_text_without_an_end_ends_with_the_call() -> None:
    answer = f"{OPENING}[search(text='a)]{CLOSING} and {OPENING}[search(n=1)]{CLOSING}"
    for size in (1, 4, 1000):
        message, _ = read(answer, size)
        assert [json.loads(c["arguments"]) for c in message.calls] == [{"n": 1}]
        assert message.content.startswith(f"{OPENING}[search(text='a)]{CLOSING}and")


def test_calls_before_a_malformed_one_stand() -> None:
    message, _ = read(f"{OPENING}[search(n=1), search(n=]{CLOSING}", 3)
    assert len(message.calls) == 1 and message.content == f", search(n=]{CLOSING}"


def test_texts_are_those_of_python() -> None:
    rng = np.random.default_rng(5)
    letters = ["a", "é", "😀", "'", '"', "\\", "\n", "\t", "\x7f", "\\n", ")", "]", ",", " ", "{"]
    for _ in range(2000):
        text = "".join(rng.choice(letters, rng.integers(0, 8)))
        written = repr(text)
        assert python_value(f"[{written}]", 0) == ([text], len(written) + 2), written
        assert ast.literal_eval(written) == text_of(written[1:-1])


def test_damaged_calls_take_no_time_and_raise_nothing() -> None:
    rng = np.random.default_rng(6)
    parts = [
        "search(",
        "n=",
        "'",
        '"',
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        ",",
        ":",
        "\\",
        "1",
        "e+",
        "-",
        "None",
        " ",
        "x",
        "\0",
        CLOSING,
    ]
    for _ in range(3000):
        text = "".join(rng.choice(parts, rng.integers(0, 20)))
        found = []
        for size in (1, 7, 1000):
            message, _ = read(f"{OPENING}[search({text}{CLOSING}", size)
            found.append((message.content, [c["arguments"] for c in message.calls]))
            assert all(isinstance(json.loads(c["arguments"]), dict) for c in message.calls)
        assert found[0] == found[1] == found[2], text
    for part in [*parts, "a' ", "'   ", 'a" ,', "(1,", "{1:", "not ", "x.", "f()", "x[0]"]:
        began = time.perf_counter()
        read(f"{OPENING}[search(n={part * 20000}", 100000)
        read(f"{OPENING}[search(n='{part * 20000}", 100000)
        assert time.perf_counter() - began < 2, part


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        ('search(text="a b")', True),
        ("search(text='a \"b\"\\n', n=3, exact=True)", True),
        ('search(text="x", kind="it\'s", tags=["a"])', True),
        ("search(text='x', kind='c')", True),
        ("search(text='x', kind=4)", True),
        ("search(text='x', code=\"b\")", True),
        ("search(text='x', code=\"d\")", False),
        ("search(text='x', kind='d')", False),
        ("search(n=3)", False),
        ("search(text='x', exact=true)", False),
        ("search(text='x', more=1)", False),
        ("search(text='a'b')", False),
        ("other(text='x')", False),
    ],
)
def test_calls_that_the_grammar_allows(call: str, allowed: bool) -> None:
    grammar = call_grammar(LFM2, [SEARCH], several=True)
    text = f"{OPENING}[{call}]{CLOSING}"
    assert accepts(grammar, text) is allowed
    assert accepts(grammar, f"{OPENING}[{call}, {call}]{CLOSING}") is allowed
    if allowed:
        meant = ast.parse(call, mode="eval").body
        assert isinstance(meant, ast.Call)
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in meant.keywords}
        assert json.loads(read(text, 3)[0].calls[0]["arguments"]) == values


def test_arguments_that_no_schema_names() -> None:
    grammar = call_grammar(LFM2, [{"name": "f", "parameters": {"type": "object"}}], several=False)
    for call, allowed in (("f()", True), ('f(a=1, b_2={"c": [null]})', True), ("f(1)", False), ("f(2a=1)", False)):
        assert accepts(grammar, f"{OPENING}[{call}]{CLOSING}") is allowed, call


HEAD = "{% if tools %}List of tools: [{{ tools | tojson }}]{% endif %}"
PLAIN = HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
NEWER = (
    HEAD
    + """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}{% set ns = namespace(calls=[]) %}{% for c in m.tool_calls %}{% set a = namespace(parts=[]) %}\
{% for k, v in c.function.arguments.items() %}{% set a.parts = a.parts + [k + '=' + ("'" + v + "'" if v is string else \
v | string)] %}{% endfor %}\
{% set ns.calls = ns.calls + [c.function.name + '(' + a.parts | join(', ') + ')'] %}{% endfor %}\
{{ '<|tool_call_start|>[' + ns.calls | join(', ') + ']<|tool_call_end|>' }}{% endif %}{{ m.content or '' }}<|im_end|>\
{% endfor %}"""
)


@pytest.mark.parametrize(
    ("template", "call"),
    [(PLAIN, 'read(path="a b", lines=[1, 2])'), (NEWER, "read(path='a b', lines=[1, 2])")],
)
def test_calls_of_a_conversation_and_forced_ones(template: str, call: str) -> None:
    assert tool_format(template) is LFM2
    assert tool_format("{{ tools }}<|tool_list_start|>") is LFM2
    shown = ChatTemplate(template).render(fitted(template, MESSAGES, [TOOL], LFM2))
    assert f"assistant\n<|tool_call_start|>[{call}]<|tool_call_end|><|im_end|>" in shown
    said = MESSAGES[1] | {"content": "I look.", "tool_calls": [CALL, CALL]}
    shown = ChatTemplate(template).render(fitted(template, [MESSAGES[0], said], [TOOL], LFM2))
    assert f"[{call}, {call}]<|tool_call_end|>I look.<|im_end|>" in shown
    with running(f"llama-server -m PUPPET -t 1 -c 512 -np 1 --chat-template {shlex.quote(template)}") as client:
        body: dict[str, Any] = {
            "messages": MESSAGES,
            "tools": [TOOL],
            "tool_choice": "required",
            "max_tokens": 200,
            "temperature": 0,
        }
        choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        (found,) = choice["message"]["tool_calls"]
        arguments = json.loads(found["function"]["arguments"])
        assert (choice["finish_reason"], choice["message"]["content"] or "") == ("tool_calls", "")
        assert found["function"]["name"] == "read" and arguments["path"] in ("a b", "c")
        events = read_events(client.post("/v1/chat/completions", json=body | {"stream": True}).text)[:-1]
        pieces = [p for e in events for p in e["data"]["choices"][0]["delta"].get("tool_calls", [])]
        assert "".join(p["function"].get("arguments", "") for p in pieces) == found["function"]["arguments"]


PYTHON = {"name": "python", "parameters": {"type": "object", "properties": {"source": {"type": "string"}}}}


def test_code_behind_a_tag() -> None:
    code = 'print("a\\n")\nx = "é"'
    for size in (1, 4, 1000):
        message, pieces = read(f"I count.{CODE_TAG}{code}", size, FUNCTIONARY, SEARCH, PYTHON)
        assert (message.content, len(message.calls)) == ("I count.", 1)
        assert (message.calls[0]["name"], json.loads(message.calls[0]["arguments"])) == ("python", {"source": code})
        assert size > 4 or len(pieces) > 3, "the code is given out as it comes"
        cut, _ = read(f"{CODE_TAG}{code}", size, FUNCTIONARY, PYTHON, cut=True)
        assert cut.calls[0]["arguments"] + '"}' == message.calls[0]["arguments"]
        other, _ = read(f"{CODE_TAG}{code}", size, FUNCTIONARY, SEARCH)
        assert (other.content, other.calls) == (f"{CODE_TAG}{code}", []), "no tool runs code"
    assert read(CODE_TAG, 3, FUNCTIONARY, {"name": "ipython"})[0].calls[0]["arguments"] == '{"code": ""}'
    called, _ = read('<function=search>{"n": 1}</function>', 3, FUNCTIONARY, SEARCH, PYTHON)
    assert called.calls[0]["name"] == "search"
    assert CODE_TAG in FUNCTIONARY.knowing([PYTHON]).markers and CODE_TAG not in FUNCTIONARY.knowing([SEARCH]).markers


def test_code_of_a_conversation() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": '{"source": "print(1)"}'}}
    messages = [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": [call, CALL]}]
    tools = [{"type": "function", "function": PYTHON}, TOOL]
    source = FUNCTIONARY_TEMPLATE
    shown = ChatTemplate(source).render(fitted(source, messages, tools, tool_format(source)), tools=tools)
    assert f"<|python_tag|>print(1)<function=read>{json.dumps({'path': 'a b', 'lines': [1, 2]})}</function>" in shown
