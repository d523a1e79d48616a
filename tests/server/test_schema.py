"""The server against its own OpenAPI document: requests made by schemathesis, each answered as documented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from ikpy.server.app import routes
from ikpy.server.openapi import ALIASES, BODIES, document
from tests.server.harness import start_server

PATHS = {route.path: route.path.replace(":path}", "}") for route in routes()}
OPERATIONS = [(m, PATHS[route.path]) for route in routes() for m in sorted((route.methods or set()) - {"HEAD"})]
GENERATING = ("n_predict", "max_tokens", "max_output_tokens", "max_completion_tokens")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")  # a second to import
    command = "llama-server -m PUPPET -t 1 -c 512 -np 2 -n 3 --embeddings --pooling mean --metrics --slot-save-path x"
    server = start_server(command, tmp_path_factory.mktemp("slots"))
    try:
        yield schemathesis.openapi.from_asgi("/openapi.json", server.app)
    finally:
        server.engine.stop(10)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_documented(api: Any, method: str, path: str) -> None:
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(case=api[path][method].as_strategy())
    def answers_as_documented(case: Any) -> None:
        check(case)

    answers_as_documented()


def check(case: Any) -> None:
    """Sends a request, kept short, and compares the answer with the document."""
    if isinstance(case.body, dict):
        limits = {name: min(case.body[name], 3) for name in GENERATING if isinstance(case.body.get(name), int)}
        case.body.update({name: value if value >= 0 else 3 for name, value in limits.items()})
        case.body.pop("n", None)
        if isinstance(case.body.get("options"), dict):
            case.body["options"] = {"num_predict": 2}
    response = case.call()
    shown = f"{case.method} {case.path}: {response.status_code} {response.text[:200]}"
    assert response.status_code in (200, 400, 404, 405, 501, 503), shown
    if response.status_code >= 400 and case.method in ("GET", "POST"):
        error = response.json()["error"]
        assert error if isinstance(error, str) else error["message"], shown
    if response.status_code == 503:
        assert case.path == "/health" or "slot" in shown
    if response.status_code != 405:
        from schemathesis.specs.openapi import checks

        conforms = checks.status_code_conformance, checks.response_schema_conformance, checks.content_type_conformance
        case.validate_response(response, checks=conforms)


def test_every_route_is_described() -> None:
    described = document(routes())["paths"]
    for route in routes():
        assert PATHS[route.path] in described
        if "POST" in (route.methods or ()):
            operation = described[route.path]["post"]
            known = ALIASES.get(route.path, route.path) in BODIES
            assert known or operation["summary"] == "Not supported", route.path


@pytest.mark.parametrize(
    ("path", "field"),
    [("/rerank", "texts"), ("/v1/embeddings", "content"), ("/v1/embeddings", "dimensions"), ("/infill", "input_extra")],
)
def test_other_forms_are_described(path: str, field: str) -> None:
    schema = document(routes())["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert field in schema["properties"]
    assert not {"documents", "input"} & {*schema.get("required", ())}, "another field may stand in its place"
