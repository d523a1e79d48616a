"""What is shown without an API key, and what pages of other origins may send."""

from __future__ import annotations

from tests.server.live import listening

LINE = "llama-server -m MODEL -t 1 -tb 1 -c 256 -np 1 --api-key secret --cors https://a.example"


def test_prompts_need_a_key() -> None:
    """Slots show them, also where the path needs none."""
    with listening(LINE) as (client, _):
        for path in ("/health", "/v1/health"):
            answer = client.get(f"{path}?include_slots=1", headers={"Authorization": ""}).json()
            assert answer["status"] == "ok" and "slots" not in answer
            known = client.get(f"{path}?include_slots=1", headers={"Authorization": "Bearer secret"}).json()
            assert "prompt" in known["slots"][0]


def test_preflight_names_the_headers_that_are_asked_for() -> None:
    with listening(LINE) as (client, _):
        asked = {"Origin": "https://a.example", "Access-Control-Request-Headers": "authorization,content-type"}
        headers = client.options("/v1/chat/completions", headers=asked).headers
        assert headers["access-control-allow-headers"] == "authorization,content-type"
        assert headers["access-control-allow-origin"] == "https://a.example"
        assert client.options("/v1/models").headers["access-control-allow-headers"] == "*"


def test_a_request_names_a_bounded_number_of_stop_strings() -> None:
    with listening(LINE.replace(" --api-key secret", "")) as (client, _):
        body = {"prompt": "x", "n_predict": 2, "stop": [f"s{i}" for i in range(1024)]}
        assert client.post("/completion", json=body).status_code == 200
        answer = client.post("/completion", json={**body, "stop": [*body["stop"], "one more"]})  # type: ignore[misc]
        assert answer.status_code == 400 and "1025 stop strings are too many" in answer.json()["error"]["message"]
