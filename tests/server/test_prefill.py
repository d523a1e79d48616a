"""Assistant messages at the end of a conversation, which the model continues."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from ikpy.server.chat.harmony import HarmonyReader
from ikpy.server.chat.output import ChatMessage
from ikpy.server.chat.prefill import with_beginning
from tests.server.harness import running

THINK = ("<think>", "</think>")
CHANNELS = "<|channel|><|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
USER = {"role": "user", "content": "Hello there"}
SCRIPT = {"383": 100}
"""The model writes `<think>\nThe user greets me.\n</think>\n\nGood day to you.`, from any token it does not know."""


@pytest.mark.parametrize(
    ("prompt", "message", "wanted", "inside"),
    [
        ("AI:", {"content": "Yes"}, "AI:Yes", False),
        ("AI:", {"content": "<think>\nHm"}, "AI:<think>\nHm", True),
        ("AI:", {"content": "<think>\nHm</think>Yes"}, "AI:<think>\nHm</think>Yes", False),
        ("AI:<think>\n", {"content": "Yes"}, "AI:Yes", False),
        ("AI:<think>\n", {"content": ""}, "AI:<think>\n", True),
        ("AI:<think>\n", {"content": "<think>\nHm"}, "AI:<think>\nHm", True),
        ("AI:<think>\n", {"content": [{"type": "text", "text": "Yes"}]}, "AI:Yes", False),
        ("AI:<think>\n", {"content": "", "reasoning_content": "Hm"}, "AI:<think>\nHm", True),
        ("AI:", {"content": "Yes", "reasoning_content": "Hm"}, "AI:<think>\nHm\n</think>\n\nYes", False),
    ],
)
def test_the_model_goes_on_with_the_content(prompt: str, message: dict[str, Any], wanted: str, inside: bool) -> None:
    assert with_beginning("{{ messages }}", prompt, message, THINK) == (wanted, inside)
    assert with_beginning("{{ messages }}", "AI:", {"content": "Yes"}, None) == ("AI:Yes", False)


@pytest.mark.parametrize(
    ("message", "wanted", "inside"),
    [
        ({"content": "Yes"}, "AI<|channel|>final<|message|>Yes", False),
        ({"content": "", "reasoning_content": "Hm"}, f"AI{ANALYSIS}Hm", True),
        (
            {"content": "Yes", "reasoning_content": "Hm"},
            f"AI{ANALYSIS}Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            False,
        ),
    ],
)
def test_answers_in_channels_go_on_in_one(message: dict[str, Any], wanted: str, inside: bool) -> None:
    assert with_beginning(CHANNELS, "AI", message, (ANALYSIS, "<|end|>")) == (wanted, inside)


@pytest.mark.parametrize("inside", [False, True])
def test_an_answer_in_channels_without_a_header(inside: bool) -> None:
    text = " to be.<|end|><|start|>assistant<|channel|>final<|message|>Yes" if inside else " to be."
    for size in (1, 4, 100):
        reader, message = HarmonyReader(tools=True, reasoning=True, inside=inside), ChatMessage()
        for i in range(0, len(text), size):
            for delta in reader.feed(text[i : i + size]):
                message.add(delta)
        for delta in reader.finish(cut=False):
            message.add(delta)
        assert (message.reasoning, message.content) == ((" to be.", "Yes") if inside else ("", " to be."))


def test_the_answer_to_a_begun_one_is_read_as_what_it_is() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}AI:<think>"
    with running(f"llama-server -m PUPPET -t 1 -c 2048 -np 1 --chat-template {shlex.quote(template)}") as client:

        def prompt(*messages: dict[str, Any]) -> str:
            return str(client.post("/apply-template", json={"messages": [USER, *messages]}).json()["prompt"])

        def answer(*messages: dict[str, Any], **body: Any) -> dict[str, Any]:
            body |= {"messages": [USER, *messages], "max_tokens": 80, "temperature": 0, "logit_bias": SCRIPT}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["message"]

        assert prompt() == "Hello thereTrueAI:<think>"
        assert prompt({"role": "assistant", "content": "Good"}) == "Hello thereTrueAI:Good"
        call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
        called = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
        assert prompt(called) == "Hello thereI look.TrueAI:<think>", "a message with calls is complete"
        thought = answer({"role": "assistant", "content": "<think>\nHm."})
        assert thought["content"] == "Good day to you." and "The user greets me." in thought["reasoning_content"]


@pytest.mark.parametrize("opening", ["<think>\n", "{# the model opens <think> by itself #}"])
def test_reasoning_that_cannot_be_switched_off_is_no_content(opening: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}AI:" + opening
    with running(f"llama-server -m PUPPET -t 1 -c 2048 -np 1 --chat-template {shlex.quote(template)}") as client:
        body = {"messages": [USER], "max_tokens": 80, "temperature": 0, "logit_bias": SCRIPT}
        for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            message = client.post("/v1/chat/completions", json=body | off).json()["choices"][0]["message"]
            assert message["content"] == "Good day to you."
            assert message["reasoning_content"].endswith("The user greets me.\n")
