"""Schemas hold for the content of chat answers; reasoning may come before it, and a tool call in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.engine.grammars.gbnf import literal
from ikpy.engine.grammars.grammar import TokenTexts, gbnf_grammar
from ikpy.engine.grammars.json_schema import schema_to_gbnf
from ikpy.server.chat.answer_grammar import answer_grammar
from ikpy.server.chat.call_grammar import call_grammar
from ikpy.server.chat.harmony import HARMONY
from ikpy.server.chat.output import OutputFormat
from ikpy.server.chat.streamed_lists import COHERE
from ikpy.server.chat.tool_formats import HERMES
from tests.server.harness import running

THINK = ("<think>", "</think>")
TAGS = OutputFormat(THINK)
OPENED = OutputFormat(THINK, in_reasoning=True)
WITH_CALLS = OutputFormat(THINK, tools=HERMES)
CHANNELS = OutputFormat(("<|channel|>analysis<|message|>", "<|end|>"), tools=HARMONY, harmony=True)
COMMAND = OutputFormat(
    ("<|START_THINKING|>", "<|END_THINKING|>"), tools=COHERE, answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
ACTION = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>'
BYTES = TokenTexts([bytes([i]) for i in range(256)], special=(), eog=(0,))
ANALYSIS = "<|channel|>analysis<|message|>Yes or no? < a <|<|end|><|start|>assistant"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CHANNEL_CALL = '<|channel|>commentary to=functions.f<|message|>{"a": 1}'


def outcome(output: OutputFormat, text: str) -> str:
    """ "whole", "begun", or the first byte that a grammar for a boolean refuses."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    calls = call_grammar(output.tools, [function], several=True) if output.tools else None
    source = answer_grammar(schema_to_gbnf({"type": "boolean"}), output, literal, calls)
    grammar = gbnf_grammar(source, BYTES)
    for i, byte in enumerate(text.encode()):
        if not grammar.allows(byte):
            return f"byte {i}"
        grammar.accept(byte)
    return "whole" if grammar.complete else "begun"


@pytest.mark.parametrize(
    ("output", "text", "wanted"),
    [
        (TAGS, "true", "whole"),
        (TAGS, "<think>\nEither < or </thin, I\ncannot say.\n</think>\n\nfalse", "whole"),
        (TAGS, "<think>true", "begun"),
        (TAGS, "<think>a</think>b", "byte 16"),
        (TAGS, "so", "byte 0"),
        (TAGS, CALL, "byte 2"),
        (OPENED, "\n\ntrue", "whole"),
        (OPENED, "<think>", "byte 0"),
        (WITH_CALLS, "false", "whole"),
        (WITH_CALLS, CALL, "whole"),
        (WITH_CALLS, f"<think>Hm.</think>\n\n{CALL}\n{CALL}", "whole"),
        (WITH_CALLS, CALL.replace('"f"', '"g"'), "byte 22"),
        (WITH_CALLS, "Let me see. " + CALL, "byte 0"),
        (CHANNELS, ANALYSIS + "<|channel|>final<|message|>true", "whole"),
        (CHANNELS, ANALYSIS + "<|channel|>final <|constrain|>json<|message|>true", "whole"),
        (CHANNELS, "<|channel|>final<|message|>true", "whole"),
        (CHANNELS, "<|channel|>final<|message|>so", "byte 27"),
        (CHANNELS, ANALYSIS + CHANNEL_CALL, "whole"),
        (CHANNELS, CHANNEL_CALL, "whole"),
        (CHANNELS, "true", "byte 0"),
        (COMMAND, "true", "whole"),
        (COMMAND, "<|START_RESPONSE|>true<|END_RESPONSE|>", "whole"),
        (COMMAND, f"<|START_THINKING|>Hm.<|END_THINKING|>{ACTION}", "whole"),
        (COMMAND, "<|START_RESPONSE|>so", "byte 18"),
        (COMMAND, "<|START_RESPONSE|>" + ACTION, "byte 18"),
    ],
)
def test_what_an_answer_may_be(output: OutputFormat, text: str, wanted: str) -> None:
    assert outcome(output, text) == wanted


@pytest.fixture(name="puppet", scope="module")
def start_puppet() -> Iterator[TestClient]:
    with running("llama-server -m PUPPET -t 1 -c 2048 -np 2") as client:
        yield client


REASONS, CALLS = {"383": 100}, {"262": 100}
"""Biases towards the first token of what the model has learnt: reasoning and a greeting, and a call of get_weather."""
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def chat(client: TestClient, bias: dict[str, int], **body: Any) -> dict[str, Any]:
    body |= {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 80, "temperature": 0}
    body["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"enum": ["red", "blue"]}}}
    response = client.post("/v1/chat/completions", json=body | {"logit_bias": bias})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_a_model_reasons_before_it_follows_a_schema(puppet: TestClient) -> None:
    message = chat(puppet, REASONS)["message"]
    assert message["reasoning_content"].startswith("The user greets me.\n")  # its next token ends in a greeting
    off = chat(puppet, REASONS, chat_template_kwargs={"enable_thinking": False})["message"]
    assert off["content"].strip() in ('"red"', '"blue"') and "reasoning_content" not in off


def test_reasoning_before_a_schema_has_its_budget(puppet: TestClient) -> None:
    message = chat(puppet, REASONS, thinking_budget_tokens=2)["message"]
    assert message["reasoning_content"] == "The user g" and message["content"].strip() in ('"red"', '"blue"')


def test_a_model_may_call_a_tool_or_follow_the_schema(puppet: TestClient) -> None:
    called = chat(puppet, CALLS, tools=[TOOL])
    assert called["finish_reason"] == "tool_calls" and called["message"]["content"] in ("", None)
    assert [call["function"]["name"] for call in called["message"]["tool_calls"]] == ["get_weather"]
    off = chat(puppet, REASONS, tools=[TOOL], chat_template_kwargs={"enable_thinking": False})["message"]
    assert off["content"].strip() in ('"red"', '"blue"') and "tool_calls" not in off
