"""Short requests, for tests of how the server behaves."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_weather", "get_time")
]


HELLO = [{"role": "user", "content": "Hello there"}]


COMMAND = "llama-server -m MODEL -t 1 -c 2048 -np 2 --metrics --slot-save-path x"


def post(client: TestClient, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def complete(client: TestClient, **body: Any) -> Any:
    return post(client, "/completion", **({"prompt": "The old man looked at", "temperature": 0, "n_predict": 6} | body))
