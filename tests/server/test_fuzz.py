"""Random request bodies: an answer or a 4xx error with a message, never a server error, and the server stays usable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from ikpy.server.app import routes
from ikpy.server.openapi import ALIASES, BODIES
from ikpy.server.read_params import FLAGS, FLOATS, INTEGERS
from tests.server.harness import start_server
from tests.server.test_bodies import WITHOUT_BODY

BODY_PATHS = [route.path for route in routes() if "POST" in (route.methods or ())]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.sampled_from([10**400, -(10**400)])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.text(max_size=12)
COMMON = (
    *FLOATS, *INTEGERS, *FLAGS, "seed", "stop", "samplers", "logit_bias", "n_probs", "grammar", "json_schema",
    "id_slot", "cache_prompt", "n_keep", "n_discard", "t_max_predict_ms", "response_fields", "post_sampling_probs",
    "stream", "timings_per_token", "banned_strings", "banned_n", "banned_bias", "rewind_count_max",
    "penalty_prompt", "thinking_budget_tokens", "reasoning_effort",
    "dry_sequence_breakers", "regex", "lark",
)  # fmt: skip
CHAT = ("tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "chat_template_kwargs",
        "reasoning_format", "stream_options", "add_generation_prompt", "parallel_tool_calls", "model")  # fmt: skip
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | VALUES
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "tool_use", "tool_result", "thinking"])},
    optional={"text": VALUES, "input": VALUES, "content": VALUES, "name": VALUES},
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": ROLES, "content": TEXTS | VALUES | st.lists(PARTS, max_size=2), "tool_calls": VALUES}
    )
    | VALUES,
    max_size=3,
)


def bodies(required: dict[str, st.SearchStrategy[Any]], names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with some fields of any type."""
    extra = st.dictionaries(st.sampled_from(names), VALUES, max_size=4)
    return st.tuples(st.fixed_dictionaries(required), extra).map(lambda pair: {**pair[1], **pair[0]})


OPTIONS = st.fixed_dictionaries(
    {"num_predict": st.integers(0, 3)},
    optional={name: VALUES for name in ("temperature", "stop", "seed", "num_keep", "mirostat")},
)
OLLAMA = ("tools", "format", "think", "stream", "raw", "system", "context", "images", "model")

REQUESTS = st.one_of(
    st.tuples(st.just("/completion"), bodies({"prompt": TEXTS | VALUES, "n_predict": st.integers(0, 3)}, COMMON)),
    st.tuples(st.just("/v1/completions"), bodies({"prompt": TEXTS | VALUES, "max_tokens": st.integers(0, 3)}, COMMON)),
    st.tuples(
        st.sampled_from(["/v1/chat/completions", "/v1/messages"]),
        bodies({"messages": MESSAGES | VALUES, "max_tokens": st.integers(0, 3)}, COMMON + CHAT),
    ),
    st.tuples(
        st.just("/v1/responses"),
        bodies({"input": MESSAGES | VALUES, "max_output_tokens": st.integers(0, 3)}, COMMON + CHAT),
    ),
    st.tuples(
        st.sampled_from(["/tokenize", "/detokenize"]), bodies({"content": VALUES, "tokens": VALUES}, ("add_special",))
    ),
    st.tuples(st.just("/apply-template"), bodies({"messages": MESSAGES | VALUES}, CHAT)),
    st.tuples(st.just("/api/chat"), bodies({"messages": MESSAGES | VALUES, "options": OPTIONS}, OLLAMA)),
    st.tuples(st.just("/api/generate"), bodies({"prompt": TEXTS | VALUES, "options": OPTIONS}, OLLAMA)),
    st.tuples(
        st.sampled_from(["/rerank", "/embedding", "/v1/embeddings", "/api/embed"]),
        bodies(
            {"query": TEXTS | VALUES, "documents": st.lists(TEXTS, max_size=2) | VALUES, "input": TEXTS | VALUES},
            ("top_n", "encoding_format", "embd_normalize", "return_documents", "texts", "content"),
        ),
    ),
)


GENERATING = ("n_predict", "max_tokens", "max_output_tokens", "max_completion_tokens")
EVERY = [path for path in BODY_PATHS if path not in WITHOUT_BODY]


def fields_of(path: str) -> tuple[str, ...]:
    """Names of the fields that a route documents, also inside the objects of a list; one that no route has if it
    documents none."""
    body = BODIES[ALIASES.get(path, path)][1]
    return tuple(
        name for name in body.get("items", body).get("properties", ("unknown",)) if name not in ("n", "n_cmpl")
    )


@pytest.fixture(name="client", scope="module")
def start_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    command = "llama-server -m PUPPET -t 1 -c 512 -np 2 -n 3 --embeddings --pooling mean --slot-save-path x --props"
    server = start_server(command, tmp_path_factory.mktemp("slots"))
    yield TestClient(server.app, raise_server_exceptions=False)
    server.engine.stop(10)


@pytest.mark.parametrize("path", EVERY)
def test_random_fields_of_every_route(client: TestClient, path: str) -> None:
    """Any JSON as the body, and objects with any values in the fields that the route documents."""
    fields = st.dictionaries(st.sampled_from(fields_of(path)), VALUES, max_size=5)
    address = path.replace("{id}", "0")

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(VALUES | fields | st.lists(fields, max_size=2), st.sampled_from(["save", "restore", "erase", "x"]))
    def check(body: Any, action: str) -> None:
        for found in body if isinstance(body, list) else [body]:
            if isinstance(found, dict):
                found.update({name: 2 for name in GENERATING if name in found})
                found.pop("options", None)
        response = client.post(address, json=body, params={"action": action} if "{id}" in path else {})
        shown = f"{body}: {response.status_code} {response.text[:300]}"
        names_file = path in ("/delete_prompt", "/rename_prompt") and response.status_code == 404
        assert response.status_code in (200, 400, 501) or names_file, shown
        if response.status_code != 200:
            error = response.json()["error"]
            assert error if isinstance(error, str) else error["message"], shown

    check()
    assert client.get("/health").json()["slots_idle"] == 2


def test_random_bodies() -> None:
    server = start_server("llama-server -m PUPPET -t 1 -c 512 -np 2 --embeddings --pooling mean")
    client = TestClient(server.app, raise_server_exceptions=False)

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(REQUESTS)
    def check(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        body.pop("n", None)
        response = client.post(path, json=body)
        assert response.status_code in (200, 400, 501), f"{path} {body}: {response.status_code} {response.text[:300]}"
        if response.status_code != 200:
            error = response.json()["error"]
            assert error if path.startswith("/api/") else error["message"]
        assert server.engine.n_idle == 2

    try:
        check()
        body = {"prompt": "x", "n_predict": 9, "logit_bias": [[259, 100]]}
        assert client.post("/completion", json=body).json()["content"] == "Hello world."
    finally:
        server.engine.stop(10)
