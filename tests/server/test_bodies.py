"""Request bodies that are too large, never arrive, or ask for much."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.server.app import routes
from ikpy.server.build import Server
from ikpy.server.front import MOST_TASKS
from ikpy.server.prompts import Prompt
from ikpy.server.routes_unsupported import UNSUPPORTED
from tests.server.harness import start_server

WITHOUT_BODY = {path for paths in UNSUPPORTED for path in paths.split()}
"""Routes that answer 501 before they read anything."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("slots")
    found = start_server(
        "llama-server -m PUPPET -t 1 -c 256 -np 1 --embeddings --pooling mean --slot-save-path x --props", folder
    )
    yield found
    found.engine.stop(10)


def posts() -> list[str]:
    """Paths that read a body."""
    found = [route.path.replace("{id}", "0") for route in routes() if "POST" in (route.methods or ())]
    return [path + ("?action=save" if "slots" in path else "") for path in found if path not in WITHOUT_BODY]


def test_every_route_limits_the_body(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.front.settings, "max_body", 1000)
    client = TestClient(server.app, raise_server_exceptions=False)
    for path in posts():
        response = client.post(path, content=b'{"x": "' + b"y" * 2000 + b'"}')
        assert response.status_code == 413, f"{path}: {response.text}"


def test_a_body_may_begin_with_a_byte_order_mark(server: Server) -> None:
    client = TestClient(server.app, raise_server_exceptions=False)
    assert client.post("/tokenize", content=b'\xef\xbb\xbf{"content": "x"}').status_code == 200
    wrong = client.post("/tokenize", content=b'\xef\xbb\xbf{"content": "x\xff"}')
    assert wrong.status_code == 400 and "not valid UTF-8" in wrong.json()["error"]["message"]


def test_a_client_that_leaves_while_it_sends_is_no_error(server: Server) -> None:
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/completion", "headers": [], "query_string": b"",
        "client": ("127.0.0.1", 1), "app": None,
    }  # fmt: skip
    messages = [{"type": "http.request", "body": b'{"prompt": ', "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(server.app(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 499


def test_many_prompts_are_one_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the queue is one of requests, not of their prompts, whose number has a limit of its own."""
    client = TestClient(server.app, raise_server_exceptions=False)
    monkeypatch.setattr(server.engine.settings, "queue_limit", 4)
    found = client.post("/v1/embeddings", json={"input": ["x"] * 40})
    assert len(found.json()["data"]) == 40
    found = client.post("/completion", json={"prompt": ["x"] * 20, "n_predict": 1})
    assert len(found.json()) == 20
    for path, body in (
        ("/v1/embeddings", {"input": ["x"] * (MOST_TASKS + 1)}),
        ("/completion", {"prompt": ["x"] * (MOST_TASKS // 2), "n": 3}),
    ):
        refused = client.post(path, json=body)
        assert refused.status_code == 400
        assert "in one request are too many" in refused.json()["error"]["message"]


def test_probabilities_have_a_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a vocabulary for a few tokens are allowed, and those that OpenAI's clients ask for in any case."""
    client = TestClient(server.app, raise_server_exceptions=False)
    n_vocab, n_ctx = server.front.model.hparams.n_vocab, server.engine.n_ctx_slot
    monkeypatch.setattr("ikpy.server.front.MOST_PROBABILITIES", 10 * n_vocab)
    body = {"prompt": "x", "logit_bias": {"259": 100}}
    scored = {"prompt": [[5] * 100] * 8, "echo": True, "max_tokens": 0}
    for path, more, status in (
        ("/completion", {"n_probs": n_vocab, "n_predict": 2}, 200),
        ("/completion", {"n_probs": 10**9, "n_predict": 10}, 200),
        ("/completion", {"n_probs": n_vocab, "n_predict": 11}, 400),
        ("/completion", {"n_probs": n_vocab}, 400),
        ("/completion", {"n_probs": n_vocab, "n_predict": 2, "n": 6}, 400),
        ("/completion", {"n_probs": 20, "n_predict": 10**9}, 200),
        ("/v1/completions", {"logprobs": 10 * n_vocab // n_ctx + 100}, 400),
        ("/v1/completions", scored | {"logprobs": 1}, 200),
        ("/v1/completions", scored | {"logprobs": 100}, 400),
    ):
        answer = client.post(path, json=body | more)
        assert answer.status_code == status, f"{more}: {answer.text[:300]}"
        assert status == 200 or "probabilities in one request are too many" in answer.json()["error"]["message"]


def test_answers_without_a_limit_end_with_their_probabilities(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(server.app, raise_server_exceptions=False)
    monkeypatch.setattr("ikpy.server.front.MOST_PROBABILITIES", 400)
    body = {"prompt": "x", "n_probs": 10, "logit_bias": {"449": 100}, "n": 2}
    for limit in (-1, 10**9):
        found = client.post("/completion", json=body | {"n_predict": limit}).json()
        assert [(item["tokens_predicted"], item["stopped_limit"]) for item in found] == [(20, True)] * 2
        assert found[0]["generation_settings"]["max_tokens"] == limit


def test_a_limit_above_the_training_context_holds_with_probabilities(server: Server) -> None:
    limit = server.engine.longest_answer + 500
    params = server.front.read_params({"n_predict": limit, "n_probs": 20})
    assert server.front._with_few_probabilities([Prompt([5], "x")], params).limit == limit
