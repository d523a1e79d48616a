"""Fields and events that clients' own types want, beyond what was recorded: OpenAI's, Anthropic's, Ollama's, vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from ikpy.server.chat.request import constrained
from ikpy.server.media import NO_MEDIA
from ikpy.server.routes_anthropic import to_chat as anthropic_to_chat
from ikpy.server.routes_responses import to_chat as responses_to_chat
from tests.server.harness import read_events, running

HELLO = [{"role": "user", "content": "Hello there"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
COLOR = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "c": {"enum": ["red", "blue"]}},
    "required": ["a", "c"],
}
BLUE = '{"a": true, "c": "blue"}'
WEATHER = {"name": "get_weather", "description": "Get the weather", "parameters": CITY}
TIME = {"name": "get_time", "description": "Get the time"}
TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER, TIME)]
PLAIN, TOOL, THINK, THINK_TOOL, TEXT_TOOL, JSON = 259, 262, 383, 395, 282, 435
"""First tokens of the puppet's scripts; that of JSON is ``BLUE``."""

GREEDY: dict[str, Any] = {"model": "m", "temperature": 0}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running("llama-server -m PUPPET -t 1 -c 4096 -np 2 --embeddings --pooling mean") as client:
        yield client


def post(client: httpx.Client, path: str, script: int = PLAIN, **body: Any) -> Any:
    answer = client.post(path, json={**GREEDY, "logit_bias": {str(script): 100}, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: httpx.Client, path: str, script: int = PLAIN, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(path, json={**GREEDY, "logit_bias": {str(script): 100}, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return [event["data"] for event in read_events(answer.text)]


def refused(client: httpx.Client, path: str, **body: Any) -> str:
    answer = client.post(path, json={"model": "m", **body})
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


# responses


def test_responses_have_the_fields_of_openais(client: httpx.Client) -> None:
    tools = [{"type": "function", **WEATHER}]
    given = {"temperature": 0.5, "metadata": {"a": "b"}, "instructions": "Be brief.", "tools": tools}
    answer = post(client, "/v1/responses", THINK, input="Hello", max_output_tokens=60, **given)
    assert {name: answer[name] for name in given} == given
    assert (answer["max_output_tokens"], answer["tool_choice"], answer["parallel_tool_calls"]) == (60, "auto", True)
    for name in ("error", "incomplete_details", "previous_response_id"):
        assert answer[name] is None, name
    usage = answer["usage"]
    cached = usage["input_tokens_details"]
    assert cached["cached_tokens"] + cached["cache_write_tokens"] == usage["input_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    plain = post(client, "/v1/responses", input="Hello", max_output_tokens=60)
    assert plain["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert (plain["tools"], plain["metadata"], plain["text"]) == ([], {}, {"format": {"type": "text"}})


@pytest.mark.parametrize("script", [PLAIN, TOOL, THINK, THINK_TOOL, TEXT_TOOL])
def test_items_of_streamed_responses_end_before_the_next_begins(client: httpx.Client, script: int) -> None:
    more = {"tools": [{"type": "function", **WEATHER}]} if script in (TOOL, THINK_TOOL, TEXT_TOOL) else {}
    events = stream(client, "/v1/responses", script, input="Hello there", max_output_tokens=80, **more)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done: list[Any] = []
    item: dict[str, Any] | None = None
    for event in events[2:-1]:
        kind = event["type"]
        assert event["output_index"] == len(done), event
        if kind == "response.output_item.added":
            assert item is None, "an item begins inside another"
            item, text, ended = event["item"], "", False
        elif kind == "response.output_item.done":
            assert item is not None and ended, f"the end of the text is missing: {event}"
            assert event["item"]["id"] == item["id"]
            done.append(event["item"])
            item = None
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind.endswith((".arguments.done", "_text.done")) or kind == "response.function_call_arguments.done":
            assert event["arguments" if "arguments" in event else "text"] == text
            ended = True
        else:
            assert kind in ("response.content_part.added", "response.content_part.done")
            assert event["part"]["text"] == text
    assert events[-1]["response"]["output"] == done
    types = {PLAIN: "message", TOOL: "function_call", THINK: "reasoning message"}
    types |= {THINK_TOOL: "reasoning function_call", TEXT_TOOL: "message function_call"}
    assert [item["type"] for item in done] == types[script].split()
    whole = post(client, "/v1/responses", script, input="Hello there", max_output_tokens=80, **more)
    assert without_ids(whole["output"]) == without_ids(done)


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("script", [PLAIN, THINK])
def test_log_probabilities_of_responses(client: httpx.Client, script: int) -> None:
    wanted = {"input": "Hello there", "max_output_tokens": 60, "include": ["message.output_text.logprobs"]}
    answer = post(client, "/v1/responses", script, **wanted, top_logprobs=2)
    found = answer["output"][-1]["content"][0]["logprobs"]
    assert found and all(len(item["top_logprobs"]) == 2 and item["logprob"] <= 0 for item in found)
    assert all(not item["top_logprobs"] for item in logprobs_of(post(client, "/v1/responses", script, **wanted)))
    events = stream(client, "/v1/responses", script, **wanted)
    message = events[-1]["response"]["output"][-1]["content"][0]
    deltas = [item for event in events if event["type"] == "response.output_text.delta" for item in event["logprobs"]]
    assert message["logprobs"] == deltas
    assert "".join(item["token"] for item in deltas).endswith(message["text"])


def logprobs_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["output"][-1]["content"][0]["logprobs"]
    assert found
    return found


def test_log_probabilities_without_alternatives(client: httpx.Client) -> None:
    choice = post(client, "/v1/chat/completions", messages=HELLO, logprobs=True, top_logprobs=0)["choices"][0]
    assert [item["token"] for item in choice["logprobs"]["content"]][:2] == ["Hel", "lo wo"]
    assert all(item["top_logprobs"] == [] for item in choice["logprobs"]["content"])


# tools


def choice_of(names: list[str], mode: str, *, responses: bool) -> dict[str, Any]:
    if responses:
        tools = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called(client: httpx.Client) -> None:
    def called(names: list[str], mode: str, script: int = TOOL) -> list[str]:
        choice = choice_of(names, mode, responses=False)
        body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 80}
        message = post(client, "/v1/chat/completions", script, **body)["choices"][0]["message"]
        other = {"input": "Hello there", "tools": [{"type": "function", **tool} for tool in (WEATHER, TIME)]}
        other |= {"tool_choice": choice_of(names, mode, responses=True), "max_output_tokens": 80}
        output = post(client, "/v1/responses", script, **other)["output"]
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        assert [item["name"] for item in output if item["type"] == "function_call"] == names
        return names

    assert called(["get_weather"], "auto") == ["get_weather"]
    assert called(["get_time"], "required") == ["get_time"]
    assert called(["get_time"], "auto") == ["get_time"]  # the script begins a call and would name the other tool
    assert called(["get_time"], "auto", PLAIN) == []
    body = {"messages": HELLO, "tools": TOOLS}
    path = "/v1/chat/completions"
    assert "get_rain" in refused(client, path, **body, tool_choice=choice_of(["get_rain"], "auto", responses=False))
    assert "allowed_tools" in refused(client, path, **body, tool_choice={"type": "allowed_tools"})
    assert "names no tools" in refused(client, path, **body, tool_choice=choice_of([], "auto", responses=False))


def test_a_tool_without_parameters_is_called_without_arguments(client: httpx.Client) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 80}
    (call,) = post(client, "/v1/chat/completions", TOOL, **body)["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}


def test_an_answer_with_tools_and_a_schema_is_a_call_or_of_the_schema(client: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": COLOR}}
    body = {"messages": HELLO, "tools": TOOLS, "response_format": form, "max_tokens": 80}
    path = "/v1/chat/completions"
    called = post(client, path, TOOL, **body)["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    for more in ({}, {"tool_choice": "none"}):
        answer = post(client, path, JSON, **body, **more)["choices"][0]
        assert (answer["message"]["content"].strip(), answer["finish_reason"]) == (BLUE, "stop")
        other = post(client, path, PLAIN, **body, **more)["choices"][0]["message"]
        thought = other["content"] == "" and "reasoning_content" in other  # comes first, and ended at the limit
        assert thought or other["content"].startswith("{") or ("tool_calls" in other and not more), other
    forced = post(client, path, PLAIN, **body, tool_choice="required")["choices"][0]
    assert forced["message"]["tool_calls"], forced
    assert "tool_calls" not in post(client, path, PLAIN, messages=HELLO, tools=TOOLS)["choices"][0]["message"]


def test_schema_of_a_json_object_as_text_generation_inference_names_it(client: httpx.Client) -> None:
    form = {"type": "json_object", "value": COLOR}
    for script, text in ((JSON, BLUE), (PLAIN, "{")):
        body = {"messages": HELLO, "response_format": form, "max_tokens": 40}
        message = post(client, "/v1/chat/completions", script, **body)["choices"][0]["message"]
        thought = script == PLAIN and message["content"] == "" and "reasoning_content" in message
        assert thought or message["content"].startswith(text)


# messages


def test_messages_of_a_schema(client: httpx.Client) -> None:
    form = {"type": "json_schema", "schema": COLOR}
    for more in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        for script, text in ((JSON, BLUE), (PLAIN, "{")):
            first = post(client, "/v1/messages", script, messages=HELLO, max_tokens=40, **more)["content"][0]
            thought = script == PLAIN and first["type"] == "thinking"
            assert thought or first["text"].startswith(text), more


@pytest.mark.parametrize("script", [PLAIN, TOOL, THINK, THINK_TOOL, TEXT_TOOL])
def test_blocks_of_streamed_messages_end_before_the_next_begins(client: httpx.Client, script: int) -> None:
    tools = [{"name": "get_weather", "input_schema": CITY}]
    more = {"tools": tools} if script in (TOOL, THINK_TOOL, TEXT_TOOL) else {}
    events = stream(client, "/v1/messages", script, messages=HELLO, max_tokens=80, **more)
    fields = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
    types, is_open = [], False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            assert not is_open, "a block begins inside another"
            assert fields[block["type"]].items() <= block.items()
            types.append(block["type"])
            is_open = True
        assert is_open and event["index"] == len(types) - 1, event
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    whole = post(client, "/v1/messages", script, messages=HELLO, max_tokens=80, **more)
    assert types == [block["type"] for block in whole["content"]]


def test_tools_that_anthropic_defines_take_any_arguments(client: httpx.Client) -> None:
    tools = [{"type": "bash_20250124", "name": "get_weather"}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 80}
    (block,) = post(client, "/v1/messages", TOOL, **body)["content"]
    assert block["input"] == {"city": "Paris", "days": 3}


# embeddings, tokens, errors


def test_dimensions_of_embeddings(client: httpx.Client) -> None:
    whole = post(client, "/v1/embeddings", input="Hello", encoding_format=None)["data"][0]["embedding"]
    n = int(np.flatnonzero(whole)[-1])
    first = np.array(whole[:n]) / np.linalg.norm(whole[:n])
    body = {"input": "Hello", "dimensions": n}
    for found in (post(client, "/v1/embeddings", **body)["data"][0], {"embedding": ollama_vector(client, **body)}):
        np.testing.assert_allclose(found["embedding"], first, atol=1e-6)
    for wrong in (0, len(whole) + 1, "8", True):
        assert "dimensions" in refused(client, "/v1/embeddings", input="Hello", dimensions=wrong)


def ollama_vector(client: httpx.Client, **body: Any) -> Any:
    answer = post(client, "/api/embed", **body)
    assert answer["total_duration"] > 0 and answer["load_duration"] == 0
    return answer["embeddings"][0]


def test_tokens_as_vllm_gives_them(client: httpx.Client) -> None:
    info = client.get("/tokenizer_info").json()
    assert "{% for m in messages %}" in info["chat_template"] and info["eos_token"] == "<|im_end|>"
    text = "Hello there"
    answer = post(client, "/tokenize", prompt=text, add_special_tokens=False)
    assert answer["tokens"] == post(client, "/tokenize", content=text)["tokens"]
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 2048)
    with_special = post(client, "/tokenize", prompt=text)["tokens"]
    assert with_special == post(client, "/tokenize", content=text, add_special=True)["tokens"]
    assert post(client, "/detokenize", tokens=answer["tokens"])["prompt"] == text


def test_unknown_ollama_routes_have_errors_of_text(client: httpx.Client) -> None:
    for path in ("/api/pull", "/api/delete"):
        answer = client.post(path, json={"model": "m"})
        assert (answer.status_code, answer.json()) == (404, {"error": "File Not Found"})
    assert client.post("/v1/pull", json={}).json()["error"]["code"] == 404


def test_errors_of_ollama_routes_with_keys_and_a_prefix() -> None:
    with running("llama-server -m PUPPET -t 1 -c 256 --api-key k --api-prefix /llm") as client:
        refused = client.post("/llm/api/chat", json={"messages": HELLO})
        assert (refused.status_code, refused.json()) == (401, {"error": "Invalid API Key"})
        assert client.post("/llm/v1/chat/completions", json={}).json()["error"]["code"] == 401
        client.headers["Authorization"] = "Bearer k"
        wrong = client.post("/llm/api/chat", json={"messages": [{"role": "user", "content": "a", "images": ["b"]}]})
        assert (wrong.status_code, wrong.json()) == (400, {"error": NO_MEDIA.format("image")})


def test_reasoning_items_belong_to_what_follows_them() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]}
    short = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "2"}
    said = {"role": "assistant", "content": "Yes"}
    given = [{"role": "user", "content": "Hi"}, thought, call, result, short, said, thought, call, result, thought]
    messages = responses_to_chat({"input": given})["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert messages[1]["reasoning_content"] == "I look."
    assert messages[3]["reasoning_content"] == "In short.\nI look." and messages[3]["content"] == "Yes"
    assert len(messages[3]["tool_calls"]) == 1
    assert (
        "reasoning_content"
        not in responses_to_chat({"input": [thought, {"role": "user", "content": "Hi"}]})["messages"][0]
    )


def test_one_call_at_a_time_of_messages() -> None:
    for kind in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}):
        body = {"messages": [], "tool_choice": kind | {"disable_parallel_tool_use": True}}
        assert anthropic_to_chat(body)["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in anthropic_to_chat({"messages": [], "tool_choice": {"type": "auto"}})


def test_a_json_object_without_a_schema() -> None:
    for more in ({}, {"schema": None}, {"value": None}):
        assert constrained({"response_format": {"type": "json_object"} | more})["json_schema"] == {"type": "object"}
    given = {"type": "json_object", "schema": None, "value": {"type": "array"}}
    assert constrained({"response_format": given})["json_schema"] == {"type": "array"}


def prompt_of(client: httpx.Client, *messages: dict[str, Any]) -> str:
    return str(client.post("/apply-template", json={"messages": messages}).raise_for_status().json()["prompt"])


def test_earlier_answers_may_be_refusals(client: httpx.Client) -> None:
    """As OpenAI's clients send them back."""
    wanted = prompt_of(client, *HELLO, {"role": "assistant", "content": "No."}, *HELLO)
    parts = [{"type": "refusal", "refusal": "No."}]
    for fields in ({"content": None, "refusal": "No."}, {"refusal": "No."}, {"content": parts}):
        assert prompt_of(client, *HELLO, {"role": "assistant", **fields}, *HELLO) == wanted
    wrong = {"role": "assistant", "content": [{"type": "refusal", "refusal": 1}]}
    assert "unsupported content" in refused(client, "/v1/chat/completions", messages=[*HELLO, wrong])


def test_calls_of_the_older_api_are_calls_of_tools(client: httpx.Client) -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "call_f", "type": "function", "function": function}
    wanted = prompt_of(
        client, *HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_f", "content": "42"},
    )  # fmt: skip
    called = {"role": "assistant", "content": None, "function_call": function}
    assert prompt_of(client, *HELLO, called, {"role": "function", "name": "f", "content": "42"}) == wanted


def test_documents_of_text_are_text(client: httpx.Client) -> None:
    def count(*blocks: dict[str, Any]) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": list(blocks)}]}
        return int(client.post("/v1/messages/count_tokens", json=body).raise_for_status().json()["input_tokens"])

    text, ask = "The old house stood at the end of the lane.", {"type": "text", "text": "Why?"}
    wanted = count({"type": "text", "text": text}, ask)
    sources = {"type": "text", "data": text}, {"type": "content", "content": [{"type": "text", "text": text}]}
    assert [count({"type": "document", "source": source}, ask) for source in sources] == [wanted] * 2
    picture = [{"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}]
    message = refused(client, "/v1/messages", messages=[{"role": "user", "content": picture}], max_tokens=1)
    assert "documents that are no text" in message


def test_results_of_tools_are_text(client: httpx.Client) -> None:
    def body(*blocks: dict[str, Any]) -> dict[str, Any]:
        call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": list(blocks)}]}
        return {"messages": [*HELLO, call, result], "max_tokens": 1}

    def count(*blocks: dict[str, Any]) -> int:
        answer = client.post("/v1/messages/count_tokens", json=body(*blocks)).raise_for_status()
        return int(answer.json()["input_tokens"])

    text = "The old house stood at the end of the lane."
    document = {"type": "document", "source": {"type": "text", "data": text}}
    assert count(document) == count({"type": "text", "text": text}) > count()
    picture = {"type": "image", "source": {"type": "base64", "data": "iVBOR"}}
    assert "image" in refused(client, "/v1/messages", **body(picture))


def test_lists_of_models_for_codex_and_for_anthropic(client: httpx.Client) -> None:
    found = client.get("/v1/models").json()
    assert found["models"][0]["slug"] == found["data"][0]["id"]
    # What one of the two slots holds: clients cut and compact their conversations by it.
    assert found["models"][0]["context_window"] == found["data"][0]["max_model_len"] == 2048
    assert "display_name" not in found["data"][0] and "has_more" not in found
    asked = {"headers": {"anthropic-version": "2023-06-01"}}
    found = client.get("/v1/models", **asked).json()
    entry, name = found["data"][0], found["data"][0]["id"]
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, name, name)
    assert (entry["type"], entry["display_name"]) == ("model", name) and entry["created_at"].endswith("Z")
    assert client.get(f"/v1/models/{name}", **asked).json() == entry
