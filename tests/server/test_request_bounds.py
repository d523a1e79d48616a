"""What one request may make the server do or say: bounds that keep it answering others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.server.build import Server
from ikpy.server.read_params import LONGEST_BREAKERS, LONGEST_STOPS, MOST_SAMPLERS
from tests.server.harness import start_server


@pytest.fixture(name="server", scope="module")
def start_tiny() -> Iterator[Server]:
    found = start_server("llama-server -m MODEL -t 1 -c 1024 -np 2 --embeddings --pooling mean")
    yield found
    found.engine.stop(10)


@pytest.fixture(name="client", scope="module")
def open_client(server: Server) -> TestClient:
    return TestClient(server.app, raise_server_exceptions=False)


def refusal(client: TestClient, path: str = "/completion", **body: Any) -> str:
    """The message of a request that is refused."""
    answer = client.post(path, json={"prompt": "The", "n_predict": 1} | body)
    assert answer.status_code == 400, answer.text[:300]
    assert len(answer.text) < 1000
    message: str = answer.json()["error"]["message"]
    return message


def accepted(client: TestClient, path: str = "/completion", **body: Any) -> Any:
    answer = client.post(path, json={"prompt": "The", "n_predict": 1} | body)
    assert answer.status_code == 200, answer.text[:300]
    return answer.json()


@pytest.mark.parametrize("one", ["t", ["temperature"]])
def test_samplers_that_are_named_again_work_again_up_to_a_bound(client: TestClient, one: Any) -> None:
    most = accepted(client, samplers=one * MOST_SAMPLERS)
    assert most["generation_settings"]["samplers"] == ["temperature"] * MOST_SAMPLERS
    options: dict[str, Any] = {"n_probs": 3, "post_sampling_probs": True, "seed": 1}
    twice = accepted(client, samplers=one * 2, temperature=0.5, **options)["completion_probabilities"]
    once = accepted(client, samplers=one, temperature=0.25, **options)["completion_probabilities"]
    assert [item["prob"] for item in twice[0]["probs"]] == pytest.approx([i["prob"] for i in once[0]["probs"]])
    assert "samplers are too many" in refusal(client, samplers=one * (MOST_SAMPLERS + 1))


def test_stop_strings_and_breakers_have_a_length(client: TestClient) -> None:
    accepted(client, stop=["x" * (LONGEST_STOPS - 1), "y"])
    assert "stop strings are too long" in refusal(client, stop=["x" * LONGEST_STOPS, "y"])
    accepted(client, dry_sequence_breakers=["x" * LONGEST_BREAKERS])
    assert "dry_sequence_breakers" in refusal(client, dry_sequence_breakers=["x" * LONGEST_BREAKERS, "y"])
