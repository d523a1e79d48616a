"""What is shown without an API key, and what pages of other origins may send."""

from __future__ import annotations

from pathlib import Path

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


def test_files_of_a_page_need_no_key_and_routes_do(tmp_path: Path) -> None:
    """Browsers send none for scripts and styles. A file that is called as a route does not open it."""
    for name in ("index.html", "app.js", "sub/page.css", "props", "v1/models/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"file {name}")
    for option in ("", "--api-prefix /llm"):
        prefix = option[-4:]
        with listening(f"{LINE} --path {tmp_path} {option}") as (client, _):
            client.headers["Authorization"] = ""
            for path, name in (("/", "index.html"), ("/app.js", "app.js"), ("/sub/page.css", "sub/page.css")):
                assert client.get(prefix + path).text == f"file {name}", path
                assert client.head(prefix + path).status_code == 200
            assert client.get(f"{prefix}/no.js").status_code == 404
            for path in ("/props", "/v1/props", "/slots", "/v1/models/x", "/completion", "/metrics", "/openapi.json"):
                assert client.get(prefix + path).status_code == 401, path
            for path in ("/app.js", "/completion", "/v1/chat/completions"):
                assert client.post(prefix + path, json={}).status_code == 401, path
            assert client.get(f"{prefix}/props", headers={"Authorization": "Bearer secret"}).status_code == 200


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
