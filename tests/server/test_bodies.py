"""Request bodies that are too large or never arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.server.app import routes
from ikpy.server.build import Server
from tests.server.harness import start_server

WITHOUT_BODY = {"/load", "/save", "/rename", "/all", "/delete"}
"""Routes that answer 501 before they read anything."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("slots")
    found = start_server("llama-server -m PUPPET -t 1 -c 256 -np 1 --embeddings --slot-save-path x", folder)
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
