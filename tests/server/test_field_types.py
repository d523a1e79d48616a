"""Fields of a wrong type: numbers and booleans become the default (test_log.py has the warning), others are 400 in the
form of each API, and the message names the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.server.read_params import FLAGS, FLOATS, INTEGERS
from tests.server.harness import running

NUMBERS = (
    *FLOATS, *INTEGERS, "n_predict", "max_tokens", "id_slot", "n", "n_cmpl", "n_keep", "n_discard", "n_probs", "seed",
    "n_cache_reuse", "t_max_predict_ms", "n_indent", "speculative.n_max", "speculative.n_min", "speculative.p_min",
)  # fmt: skip
BOOLEANS = (*FLAGS, "stream", "cache_prompt", "timings_per_token", "post_sampling_probs", "return_progress",
            "return_tokens")  # fmt: skip
LISTS = "stop", "samplers", "response_fields", "banned_strings", "banned_regex"
TEXTS = "grammar", "lark", "regex"
ARRAYS = {"lora": [5, "a", {}, True], "logit_bias": [5, "a", True], "penalty_prompt": [5, {}, True]}
UNUSED: dict[str, list[Any]] = {
    **{name: ["7", "", [], [1], {}] for name in NUMBERS},
    **{name: [1, 0.5, "true", "", [], {}] for name in BOOLEANS},
}
WRONG: dict[str, list[Any]] = {
    **{name: [5, {}, True, [1], ["a", None]] for name in LISTS},
    **{name: [5, ["a"], {}, False] for name in TEXTS},
    **ARRAYS,
}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture(name="client", scope="module")
def start_client() -> Iterator[TestClient]:
    with running("llama-server -m PUPPET -t 1 -c 512 -np 2 -n 3") as client:
        yield client


def refusal(client: TestClient, path: str, body: dict[str, Any]) -> str:
    """The message of an error 400."""
    response = client.post(path, json=body)
    assert response.status_code == 400, f"{body}: {response.status_code} {response.text[:200]}"
    error = response.json()["error"]
    if path.startswith("/api/"):
        return error
    assert error["type"] == "invalid_request_error"
    return error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", WRONG)
def test_a_field_of_a_wrong_type_is_named(client: TestClient, path: str, name: str) -> None:
    for value in WRONG[name]:
        assert name in refusal(client, path, BODIES[path] | {name: value}), value


def test_numbers_and_booleans_of_a_wrong_type_are_the_default(client: TestClient) -> None:
    plain = client.post("/completion", json={"prompt": "a"}).json()
    for name, values in UNUSED.items():
        for value in values:
            answer = client.post("/completion", json={"prompt": "a", name: value}).json()
            assert answer["generation_settings"] == plain["generation_settings"], (name, value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            ("/v1/chat/completions", {"messages": MESSAGES, name: value})
            for name in ("stream_options", "response_format", "chat_template_kwargs")
            for value in (5, "json", [1])
        ),
        *(
            ("/v1/messages", {"messages": MESSAGES, name: value})
            for name in ("thinking", "output_config", "tool_choice")
            for value in (5, "auto", [1])
        ),
        *(("/v1/messages", {"messages": MESSAGES, "system": value}) for value in (5, True, {"a": 1})),
        *(
            ("/v1/responses", {"input": "Hi", name: value})
            for name in ("text", "reasoning")
            for value in (5, "low", [1])
        ),
        ("/v1/responses", {"input": "Hi", "instructions": ["a"]}),
        ("/v1/responses", {"input": "Hi", "text": {"format": "json"}}),
        ("/api/chat", {"messages": MESSAGES, "think": 5}),
    ],
)
def test_fields_of_one_route(client: TestClient, path: str, body: dict[str, Any]) -> None:
    assert "type must be" in refusal(client, path, body)


def test_objects_of_these_names_are_taken(client: TestClient) -> None:
    """Also null in their places, and the form of answers as clients of text-generation-inference write it."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", dict.fromkeys(("system", "thinking", "output_config", "tool_choice"))),
        ("/v1/responses", dict.fromkeys(("text", "reasoning", "instructions", "tool_choice"))),
        ("/v1/responses", {"text": {"format": None}, "reasoning": {}}),
        ("/v1/chat/completions", dict.fromkeys(("stream_options", "response_format", "chat_template_kwargs"))),
        ("/v1/chat/completions", {"response_format": {"type": "json", "value": schema}}),
    ]
    for path, more in bodies:
        response = client.post(path, json=BODIES[path] | more)
        assert response.status_code == 200, f"{more}: {response.text}"


def test_null_is_the_default_and_a_boolean_a_number(client: TestClient) -> None:
    body: dict[str, Any] = dict.fromkeys((*NUMBERS, *BOOLEANS, *LISTS, *TEXTS, *ARRAYS))
    answer = client.post("/completion", json=body | {"prompt": "a", "n_predict": True, "top_k": True}).json()
    assert answer["tokens_predicted"] == 1 and answer["generation_settings"]["top_k"] == 1
    assert answer["generation_settings"]["temperature"] == pytest.approx(0.8)


@pytest.mark.parametrize(("wanted", "n_shown"), [(True, 20), (2, 2), (0, None), (False, None)])
def test_logprobs_of_chats_may_be_their_number(client: TestClient, wanted: Any, n_shown: int | None) -> None:
    found = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1, "logprobs": wanted}).json()
    shown = found["choices"][0].get("logprobs")
    assert (len(shown["content"][0]["top_logprobs"]) if shown else None) == n_shown
