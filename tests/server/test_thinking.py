"""The limit of reasoning: forced end, where it counts, and grammars that hold only behind reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.engine.grammars.grammar import TokenTexts, gbnf_grammar
from ikpy.engine.grammars.thinking import LimitedThinking, ThinkingLimit, ends_inside_character
from tests.server.harness import read_events, running

HELLO = [{"role": "user", "content": "Hello there"}]
SCRIPT = {"383": 100}
"""The model writes `<think>\nThe user greets me.\n</think>\n\nGood day to you.`, from any token it does not know."""
ANSWER = "<think>\nThe user greets me.\n</think>\n\nGood day to you."
OPEN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<tool_call><think>\n"
"""A template that opens the reasoning itself."""


@pytest.fixture(name="puppet", scope="module")
def start_puppet() -> Iterator[TestClient]:
    with running("llama-server -m PUPPET -t 1 -c 2048 -np 2") as client:
        yield client


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 80, "temperature": 0, "logit_bias": SCRIPT} | body
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


@pytest.mark.parametrize(
    ("budget", "reasoning"),
    [(0, None), (1, "The "), (2, "The user g"), (4, "The user greets me."), (5, "The user greets me.\n")],
)
def test_reasoning_ends_after_the_budget(puppet: TestClient, budget: int, reasoning: str | None) -> None:
    message = chat(puppet, thinking_budget_tokens=budget)
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == (ANSWER if budget < 5 else "Good day to you."), "a begun closing tag is completed"


def test_a_stream_shows_the_forced_end(puppet: TestClient) -> None:
    body = {"messages": HELLO, "max_tokens": 80, "temperature": 0.7, "logit_bias": SCRIPT, "stream": True}
    text = puppet.post("/v1/chat/completions", json=body | {"thinking_budget_tokens": 2}).text
    deltas = [event["data"]["choices"][0]["delta"] for event in read_events(text)[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "The user g"
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER


def test_no_budget_and_a_large_one_change_nothing(puppet: TestClient) -> None:
    free = chat(puppet)
    assert free["reasoning_content"] == "The user greets me.\n"
    for budget in (-1, 1000, None):
        assert chat(puppet, thinking_budget_tokens=budget) == free


def test_anthropic_requests_have_a_budget_too(puppet: TestClient) -> None:
    body = {"messages": HELLO, "max_tokens": 80, "temperature": 0, "logit_bias": SCRIPT}
    answer = puppet.post("/v1/messages", json=body | {"thinking": {"type": "enabled", "budget_tokens": 2}}).json()
    assert [(b["type"], b.get("thinking", b.get("text"))) for b in answer["content"]] == [
        ("thinking", "The user g"),
        ("text", ANSWER),
    ]


def test_budget_and_message_of_the_command_line() -> None:
    command = "llama-server -m PUPPET -t 1 -c 2048 -np 1 --reasoning-budget 1 --reasoning-budget-message ' Enough.'"
    with running(command) as client:
        assert chat(client)["reasoning_content"] == "The  Enough."
        assert chat(client, thinking_budget_tokens=-1)["reasoning_content"] == "The user greets me.\n"
        raw = chat(client, reasoning_format="none")["content"]
        assert raw.startswith("<think>\nThe  Enough.</think>"), "the tags count wherever their text goes"
        assert chat(client, reasoning_format=None)["reasoning_content"] == "The  Enough."


def test_reasoning_that_the_prompt_has_opened() -> None:
    command = f"llama-server -m PUPPET -t 1 -c 2048 -np 1 --chat-template {json.dumps(OPEN)}"
    with running(command.replace("\\n", "\n")) as client:
        message = chat(client, thinking_budget_tokens=0)
        assert message["content"] == ANSWER and "reasoning_content" not in message
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        message = chat(client, response_format=form, logit_bias={}, thinking_budget_tokens=3, max_tokens=300)
        assert set(json.loads(message["content"])) == {"a"}, "the schema holds for the content, not for the reasoning"
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        message = chat(
            client, tools=tools, tool_choice="required", logit_bias={}, thinking_budget_tokens=3, max_tokens=300
        )
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_effort_of_reasoning_reaches_the_template() -> None:
    template = "{{ messages[0].content }} {{ reasoning_effort }} {{ enable_thinking }}"
    with running(f"llama-server -m PUPPET -t 1 -c 256 -np 1 --chat-template '{template}'") as client:
        for body, wanted in (
            ({"reasoning_effort": "low"}, "Hello there low True"),
            ({"reasoning_effort": "none"}, "Hello there none False"),
            (
                {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
                "Hello there high True",
            ),
            ({"reasoning_effort": 3}, "Hello there  True"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "Hello there  False"),
        ):
            answer = client.post("/apply-template", json={"messages": HELLO} | body)
            assert answer.json()["prompt"] == wanted, body
        body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": "false"}}
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "expected boolean" in refused.text, "the text is true in a template"
        more = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"reasoning_effort": "high"}, "max_tokens": 1}
        client.post("/v1/messages", json={"messages": HELLO} | more).raise_for_status()
        assert client.get("/slots").json()[0]["prompt"] == "Hello there high False"
        body = {"input": "Hello there", "reasoning": {"effort": "low"}, "max_output_tokens": 1}
        client.post("/v1/responses", json=body).raise_for_status()
        assert client.get("/slots").json()[0]["prompt"] == "Hello there low True"
        body = {"messages": HELLO, "think": "none", "stream": False, "options": {"num_predict": 1}}
        client.post("/api/chat", json=body).raise_for_status()
        assert client.get("/slots").json()[0]["prompt"] == "Hello there none False"


BYTES = TokenTexts([bytes([i]) for i in range(256)], eog=(0,))


def limited(n_max: int, **more: Any) -> LimitedThinking:
    grammar = more.pop("grammar", None)
    return LimitedThinking(
        ThinkingLimit(n_max, "<t>", "</t>", tuple(b"!</t>"), **more), grammar, 256, lambda i: bytes([i])
    )


def written(state: LimitedThinking, wanted: bytes) -> bytes:
    """What comes out when a model wants to write ``wanted``."""
    out = bytearray()
    for byte in wanted:
        while not state.allows(byte):
            (forced,) = state.mask().nonzero()[0]
            state.accept(int(forced))
            out.append(int(forced))
        state.accept(byte)
        out.append(byte)
    return bytes(out)


@pytest.mark.parametrize(
    ("wanted", "options", "result"),
    [
        (b"<t>abcdef</t>x", {}, b"<t>abc!</t>def</t>x"),
        (b" \n<t>abcd", {}, b" \n<t>abc!</t>d"),
        (b"<t>ab</t><t>cdef", {}, b"<t>ab</t><t>cdef"),
        (b"<t>ab</t><t>cdef", {"again": True}, b"<t>ab</t><t>!</t>cdef"),
        (b"x<t>abcdef", {}, b"x<t>abcdef"),
        (b"x<t>abcdef", {"again": True}, b"x<t>abc!</t>def"),
        (b"abcdef", {"inside": True}, b"abc!</t>def"),
        ("aaéé".encode(), {"inside": True}, "aaé!</t>é".encode()),
        (b"ab</t>x", {"inside": True}, b"ab</t>x"),
    ],
)
def test_where_the_end_is_forced(wanted: bytes, options: dict[str, Any], result: bytes) -> None:
    state = limited(3, **options)
    for _ in range(2):
        assert written(state, wanted) == result
        state.reset()


def test_a_grammar_holds_beside_the_limit() -> None:
    state = limited(2, inside=True, grammar=gbnf_grammar('root ::= [a-z]* "!</t>" "yes"', BYTES))
    assert state.allows(ord("a")) and not state.allows(ord("A"))
    assert written(state, b"aayes") == b"aa!</t>yes"
    strict = limited(1, inside=True, grammar=gbnf_grammar("root ::= [a-z]+", BYTES))
    assert written(strict, b"abc") == b"abc", "an end that the grammar forbids is not forced"
    assert strict.mask()[ord("d")]


def test_unfinished_characters() -> None:
    for text in ("é", "€", "😀"):
        data = text.encode()
        assert [ends_inside_character(data[:n]) for n in range(len(data) + 1)] == [False] + [True] * (len(data) - 1) + [
            False
        ]
