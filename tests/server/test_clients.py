"""The official OpenAI and Anthropic clients against a running server; skipped where they are not installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import listening

TOOL = {"name": "get_weather", "description": "Get the weather"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with listening("llama-server -m PUPPET -t 1 -c 4096 -np 2 --embeddings --pooling mean") as (client, _):
        yield str(client.base_url)


def test_openai_client(address: str) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "PUPPET"
    create = client.chat.completions.create
    plain = create(model="m", messages=HELLO, logit_bias={"259": 100}, max_tokens=20)
    assert plain.choices[0].message.content == "Hello world."
    assert plain.usage.completion_tokens == 4
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    stream = create(model="m", messages=HELLO, logit_bias={"383": 100}, max_tokens=40, **options)
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Good day to you."
    assert chunks[-1].usage.completion_tokens == 13
    tools: list[Any] = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
    call = create(model="m", messages=HELLO, tools=tools, logit_bias={"262": 100}, max_tokens=60).choices[0]
    assert call.finish_reason == "tool_calls"
    assert json.loads(call.message.tool_calls[0].function.arguments) == {"city": "Paris", "days": 3}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "c": {"enum": ["red", "blue"]}},
        "required": ["a", "c"],
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = create(model="m", messages=HELLO, response_format=form, logit_bias={"435": 100}, max_tokens=60)
    assert set(json.loads(answer.choices[0].message.content)) == {"a", "c"}
    logprobs = create(model="m", messages=HELLO, logit_bias={"259": 100}, max_tokens=2, logprobs=True, top_logprobs=2)
    assert [item.token for item in logprobs.choices[0].logprobs.content] == ["Hel", "lo wo"]
    text = client.completions.create(model="m", prompt="x", logit_bias={"259": 100}, max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in text) == "Hello world."
    several = client.completions.create(model="m", prompt=["x", "The"], n=2, logit_bias={"259": 100}, max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    alone = [client.completions.create(model="m", prompt=text, max_tokens=1).usage for text in ("x", "The")]
    assert several.usage.prompt_tokens == sum(one.prompt_tokens for one in alone)
    assert several.usage.completion_tokens == 12
    assert len(client.embeddings.create(model="m", input=["Hello", "world"]).data) == 2
    answer = client.responses.create(model="m", input="Hello there", max_output_tokens=1)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    ended: dict[str, Any] = {"max_output_tokens": 20, "extra_body": {"logit_bias": {"259": 100}}}
    answer = client.responses.create(model="m", input="Hello there", **ended)
    assert (answer.status, answer.output_text, answer.incomplete_details) == ("completed", "Hello world.", None)
    scored = client.completions.create(model="m", prompt=["x", "The"], max_tokens=0, echo=True, logprobs=1)
    for choice in scored.choices:
        lists = choice.logprobs
        assert choice.text in ("x", "The") and lists.token_logprobs[0] is None
        assert len(lists.tokens) == len(lists.text_offset) == len(lists.top_logprobs)
    with pytest.raises(openai.BadRequestError, match="Unknown reasoning format"):
        create(model="m", messages=HELLO, extra_body={"reasoning_format": "zzz"})


def test_streams_of_the_openai_client(address: str) -> None:
    """Its helpers put answers together from the places that events name."""
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    tools: list[Any] = [{"type": "function", "strict": True, "parameters": SCHEMA, **TOOL}]

    def streamed(bias: int, **more: Any) -> tuple[Any, str]:
        extra = {"logit_bias": {str(bias): 100}}
        with client.responses.stream(model="m", input="Hello there", extra_body=extra, **more) as stream:
            events = list(stream)
        assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
        return events[-1].response, "".join(e.delta for e in events if e.type == "response.output_text.delta")

    answer, text = streamed(259)
    assert (answer.status, answer.output_text, text) == ("completed", "Hello world.", "Hello world.")
    answer, text = streamed(383)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert (answer.output_text, text) == ("Good day to you.", "Good day to you.")
    answer, _ = streamed(395, tools=tools)
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    assert json.loads(answer.output[-1].arguments) == {"city": "Paris", "days": 3}
    assert answer.output[-1].id == answer.output[-1].call_id
    answer, text = streamed(259, max_output_tokens=1)
    assert (answer.status, answer.output[-1].status, answer.output_text) == ("incomplete", "incomplete", text)
    with client.chat.completions.stream(
        model="m", messages=HELLO, max_tokens=60, extra_body={"logit_bias": {"383": 100}}
    ) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == "Good day to you."


def test_anthropic_client(address: str) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    create = client.messages.create
    plain = create(model="m", messages=HELLO, max_tokens=20, extra_body={"logit_bias": {"259": 100}})
    assert plain.content[0].text == "Hello world."
    assert plain.stop_reason == "end_turn"
    assert create(model="m", messages=HELLO, max_tokens=1).stop_reason == "max_tokens"
    stopping: dict[str, Any] = {"stop_sequences": ["orl"], "extra_body": {"logit_bias": {"259": 100}}}
    stopped = create(model="m", messages=HELLO, max_tokens=20, **stopping)
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("Hello w", "stop_sequence", "orl")
    with client.messages.stream(model="m", messages=HELLO, max_tokens=20, **stopping) as stream:
        message = stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "orl")
    with client.messages.stream(
        model="m", messages=HELLO, max_tokens=60, extra_body={"logit_bias": {"383": 100}}
    ) as stream:
        assert "".join(stream.text_stream) == "Good day to you."
        assert stream.get_final_message().content[0].type == "thinking"
    tools: list[Any] = [{**TOOL, "input_schema": SCHEMA}]
    with client.messages.stream(
        model="m", messages=HELLO, max_tokens=60, tools=tools, extra_body={"logit_bias": {"262": 100}}
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    assert message.content[0].input == {"city": "Paris", "days": 3}
    assert client.messages.count_tokens(model="m", messages=HELLO).input_tokens == 30
    with pytest.raises(anthropic.BadRequestError):
        create(model="m", messages=[{"role": "user", "content": [{"type": "image"}]}], max_tokens=5)  # type: ignore[typeddict-item]
