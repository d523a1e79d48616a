"""The Ollama API and reranking."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.server.ollama_requests import chat_messages
from ikpy.server.routes_embeddings import beginning
from tests.server.harness import running

HELLO = [{"role": "user", "content": "Hello there"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module", name="puppets")
def start_puppets() -> Iterator[dict[int, TestClient]]:
    """Servers whose model speaks the script with this first token: Ollama requests have no logit bias."""
    with (
        running("llama-server -m PUPPET -t 1 -c 4096 -np 2 -l 259+100") as plain,
        running("llama-server -m PUPPET -t 1 -c 2048 -np 1 -l 262+100") as tool,
        running("llama-server -m PUPPET -t 1 -c 2048 -np 1 -l 383+100") as think,
    ):
        yield {259: plain, 262: tool, 383: think}


def lines(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def test_streamed_chat(puppets: dict[int, TestClient]) -> None:
    got = lines(puppets[259], "/api/chat", model="m", messages=HELLO)
    assert "".join(item["message"]["content"] for item in got) == "Hello world."
    assert [item["done"] for item in got] == [False] * (len(got) - 1) + [True]
    last = got[-1]
    assert (last["model"], last["done_reason"], last["eval_count"]) == ("m", "stop", 4)
    assert last["prompt_eval_count"] > 5
    assert 0 < last["eval_duration"] <= last["total_duration"]


def test_chat_at_once_with_limit_and_thinking(puppets: dict[int, TestClient]) -> None:
    body: dict[str, Any] = {"messages": HELLO, "stream": False, "options": {"num_predict": 1}}
    got = puppets[259].post("/api/chat", json=body).json()
    assert (got["message"]["content"], got["done_reason"]) == ("Hel", "length")
    got = puppets[383].post("/api/chat", json={"messages": HELLO, "stream": False}).json()
    assert got["message"]["content"] == "Good day to you."
    assert got["message"]["thinking"]
    streamed = lines(puppets[383], "/api/chat", messages=HELLO)
    assert "".join(item["message"].get("thinking", "") for item in streamed) == got["message"]["thinking"]


def test_tool_calls_have_objects_as_arguments(puppets: dict[int, TestClient]) -> None:
    got = puppets[262].post("/api/chat", json={"messages": HELLO, "tools": [TOOL], "stream": False}).json()
    wanted = [{"function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}}]
    assert got["message"]["tool_calls"] == wanted
    streamed = lines(puppets[262], "/api/chat", messages=HELLO, tools=[TOOL])
    assert [item["message"]["tool_calls"] for item in streamed if "tool_calls" in item["message"]] == [wanted]
    history = [*HELLO, got["message"], {"role": "tool", "tool_name": "get_weather", "content": "rain"}]
    assert puppets[259].post("/api/chat", json={"messages": history, "stream": False}).status_code == 200


def test_generate_raw_templated_and_continued(puppets: dict[int, TestClient]) -> None:
    body = {"prompt": "x", "raw": True, "stream": False}
    raw = puppets[259].post("/api/generate", json=body).json()
    assert raw["response"] == "Hello world."
    templated = puppets[259].post("/api/generate", json={"prompt": "x", "system": "s", "stream": False}).json()
    assert templated["prompt_eval_count"] > raw["prompt_eval_count"]
    assert len(raw["context"]) == raw["prompt_eval_count"] + raw["eval_count"]
    more = puppets[259].post("/api/generate", json=body | {"context": raw["context"]}).json()
    assert more["prompt_eval_count"] >= len(raw["context"])
    with running("llama-server -m MODEL -t 1 -c 512 -np 1") as client:
        first = client.post("/tokenize", json={"content": "", "add_special": True}).json()["tokens"]
        more = client.post("/api/generate", json=body | {"context": [*first, 5], "options": {"num_predict": 1}}).json()
        assert first and more["context"][: len(first) + 1] == [*first, 5]
        assert first[0] not in more["context"][1:-1], "a prompt that goes on does not begin anew"
    streamed = lines(puppets[259], "/api/generate", prompt="x")
    assert "".join(item["response"] for item in streamed) == "Hello world."


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "x"}),
        ("/api/generate", {"prompt": "x", "raw": True}),
    ],
)
def test_log_probabilities(puppets: dict[int, TestClient], path: str, body: dict[str, Any]) -> None:
    for token, n_top in ((259, 0), (259, 3), (383, 2)):
        body = body | {"logprobs": True, "top_logprobs": n_top}
        whole = puppets[token].post(path, json=body | {"stream": False}).json()
        assert len(whole["logprobs"]) == whole["eval_count"]
        for entry in whole["logprobs"]:
            assert entry["logprob"] <= 0 and bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
            top = entry.get("top_logprobs", [])
            assert len(top) == n_top and sorted(top, key=lambda item: -item["logprob"]) == top
            assert all(set(item) == {"token", "logprob", "bytes"} for item in top)
        streamed = [entry for item in lines(puppets[token], path, **body) for entry in item.get("logprobs", [])]
        assert streamed == whole["logprobs"], "every token comes once, with the first text that it belongs to"
    plain = puppets[259].post(path, json=body | {"logprobs": False, "stream": False}).json()
    assert "logprobs" not in plain
    refused = puppets[259].post(path, json=body | {"top_logprobs": 21})
    assert refused.status_code == 400 and "between 0 and 20" in refused.json()["error"]


def test_format_and_loading(puppets: dict[int, TestClient]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    body = {"messages": HELLO, "format": schema, "stream": False, "options": {"num_predict": 60}}
    got = puppets[259].post("/api/chat", json=body).json()["message"]["content"]
    assert '{"a":1}'.startswith("".join(got.split())), got
    assert puppets[259].post("/api/chat", json={"model": "m"}).json()["done_reason"] == "load"
    assert puppets[259].post("/api/generate", json={"model": "m"}).json()["done_reason"] == "load"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": 5}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}),
        ("/api/chat", {"messages": HELLO, "options": []}),
        ("/api/chat", {"messages": HELLO, "format": "xml"}),
        ("/api/generate", {"prompt": 5}),
        ("/api/generate", {"prompt": "x", "context": ["a"]}),
    ],
)
def test_errors_are_strings(puppets: dict[int, TestClient], path: str, body: dict[str, Any]) -> None:
    response = puppets[259].post(path, json=body)
    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


def test_questions_about_models(puppets: dict[int, TestClient]) -> None:
    client = puppets[259]
    listed = client.get("/api/tags").json()["models"][0]
    loaded, name = client.get("/api/ps").json()["models"][0], listed["name"]
    assert loaded["model"] == name == "PUPPET"
    # Ollama's program shows the first 12 digits, and a model whose time is over as one that stops.
    assert re.fullmatch("[0-9a-f]{64}", listed["digest"]) and loaded["digest"] == listed["digest"]
    assert loaded["expires_at"] > "2400" and loaded["context_length"] == 2048
    assert listed["details"]["quantization_level"] == "F16"
    shown = client.post("/api/show", json={"model": name}).json()
    assert set(shown["capabilities"]) == {"completion", "tools", "thinking"}
    assert shown["model_info"]["general.architecture"]
    assert client.get("/api/version").json()["version"]
    assert client.post("/api/embed", json={"input": "x"}).status_code == 501


def test_embeddings_and_reranking() -> None:
    with running("llama-server -m MODEL -t 1 -c 512 --embeddings --pooling mean") as client:
        got = client.post("/api/embed", json={"input": ["the sea", "a letter"]}).json()
        assert len(got["embeddings"]) == 2
        assert abs(sum(x * x for x in got["embeddings"][0]) - 1) < 1e-5
        one = client.post("/api/embeddings", json={"prompt": "the sea"}).json()["embedding"]
        assert one == pytest.approx(got["embeddings"][0], abs=1e-5)
        assert client.post("/api/embeddings", json={"prompt": ""}).json() == {"embedding": []}
        text = "the old sea " * 300
        cut = client.post("/api/embed", json={"input": [text, "the sea"]}).json()
        assert cut["prompt_eval_count"] > 512 and len(cut["embeddings"]) == 2
        assert client.post("/api/embeddings", json={"prompt": text}).json()["embedding"] == cut["embeddings"][0]
        assert client.post("/api/embed", json={"input": text, "truncate": False}).status_code == 400
        documents = ["a letter came", "the old sea", "the sea"]
        body: dict[str, Any] = {"query": "the sea", "documents": documents, "return_documents": True}
        for path in ("/rerank", "/v1/rerank", "/reranking", "/v1/reranking"):
            ranked = client.post(path, json=body).json()
            assert ranked["results"][0]["index"] == 2
            assert ranked["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-4)
            scores = [item["relevance_score"] for item in ranked["results"]]
            assert scores == sorted(scores, reverse=True) and len(scores) == 3
            assert ranked["results"][0]["document"]["text"] == "the sea"
            assert ranked["usage"]["total_tokens"] > 8
        assert len(client.post("/rerank", json=body | {"top_n": 1}).json()["results"]) == 1
        plain = client.post("/rerank", json={"query": "the sea", "texts": documents}).json()
        assert plain[0].keys() == {"index", "score"}
        asked = {"query": "the sea", "texts": documents, "return_text": True}
        assert [item["text"] for item in client.post("/rerank", json=asked).json()] == [
            documents[item["index"]] for item in plain
        ]
        for wrong in ({"query": 5, "documents": ["a"]}, {"query": "a", "documents": []}, {"query": "a"},
                      {"query": "a", "documents": [5]}):  # fmt: skip
            assert client.post("/rerank", json=wrong).status_code == 400
    with running("llama-server -m MODEL -t 1 -c 512") as client:
        assert client.post("/rerank", json=body).status_code == 501
    with running("llama-server -m MODEL -t 1 -c 512 --embeddings") as client:
        for path, asked in (("/api/embed", {"input": "the sea"}), ("/api/embeddings", {"prompt": "the sea"})):
            refused = client.post(path, json=asked)
            assert refused.status_code == 400 and "--pooling mean" in refused.json()["error"]


def test_calls_and_their_results_have_ids() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}, {"id": "x", "function": {"name": "g", "arguments": {}}}]
    result = {"role": "tool", "content": "1", "tool_name": "f"}
    turn = [{"role": "assistant", "tool_calls": calls}, result, result | {"tool_name": "g"}]
    found = chat_messages([*turn, *turn[:2], result | {"tool_call_id": "own"}])
    assert [m.get("tool_call_id") for m in found if m["role"] == "tool"] == ["call_1", "x", "call_3", "own"]
    assert [c["id"] for m in found for c in m.get("tool_calls", [])] == ["call_1", "x", "call_3", "x"]
    assert found[1]["name"] == "f"


def test_the_beginning_of_a_text_ends_as_the_text_does() -> None:
    vocab: Any = SimpleNamespace(eos=2, sep=3)
    assert beginning([1, 5, 6, 7], 4, vocab) == [1, 5, 6, 7]
    assert beginning([1, 5, 6, 7], 3, vocab) == [1, 5, 6]
    assert beginning([1, 5, 6, 3], 3, vocab) == [1, 5, 3]
