"""Requests that are malformed, too large or name what is not there: a message, and no harm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from ikpy.server.chat.output import ChatMessage
from ikpy.server.chat.tagged_values import typed_value
from ikpy.server.http import to_json
from ikpy.server.routes_anthropic import content_blocks
from tests.server.behaviour import COMMAND, complete, post
from tests.server.harness import running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with running(COMMAND, tmp_path_factory.mktemp("slots")) as client:
        yield client


def test_grammar_errors_name_the_place(tiny: TestClient) -> None:
    message = post(tiny, "/completion", 400, prompt="x", grammar='root ::= ("yes"')["error"]["message"]
    assert "line 1" in message
    message = post(tiny, "/completion", 400, prompt="x", json_schema={"type": "wrong"})["error"]["message"]
    assert "wrong" in message


BAD_BODIES = [
    ("/completion", b"{"), ("/completion", b""), ("/completion", b"null"), ("/completion", b'{"prompt": NaN}'),
    ("/completion", b'{"prompt": [[]]}'), ("/completion", b'{"prompt": [[1.5]]}'), ("/completion", b"[" * 100000),
    ("/completion", b'{"prompt": "x", "n": 0}'), ("/completion", b'{"prompt": "x", "n": 1e9}'),
    ("/completion", b'{"prompt": "x", "mirostat": 7}'), ("/completion", b'{"prompt": "x", "repeat_penalty": 0}'),
    ("/completion", b'{"prompt": "x", "grammar": "root ::= root"}'), ("/completion", b'{"prompt": [99999999999999]}'),
    ("/v1/chat/completions", b'{"messages": [5]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": 5, "content": 5}]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 5}]}'),
    ("/v1/chat/completions", b'{"messages": [], "tools": [{}]}'),
    ("/v1/chat/completions", b'{"messages": [], "tool_choice": {}}'),
    ("/apply-template", b'{"messages": [{"role": "user", "content": "", "tool_calls": [null]}]}'),
    ("/apply-template", b'{"messages": [{"role": "user", "content": "", "tool_calls": 5}]}'),
    ("/v1/messages", b'{"messages": 5}'), ("/v1/messages", b'{"messages": [5]}'),
    ("/v1/messages", b'{"messages": [{"role": "user", "content": [5]}]}'),
    ("/v1/messages", b'{"messages": [], "tools": [5]}'), ("/v1/responses", b'{"input": 5}'),
    ("/v1/responses", b'{"input": [5]}'), ("/v1/responses", b'{"input": [{"type": "zzz"}]}'),
    ("/v1/responses", b'{"input": [{}]}'), ("/tokenize", b'{"content": {}}'), ("/detokenize", b'{"tokens": [1.5]}'),
    ("/lora-adapters", b"{"), ("/delete_prompt", b"{}"),
    ("/v1/messages", b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": []}}'),
    ("/v1/messages/count_tokens", b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": {}}}'),
    *((path, b'{"messages": [{"role": "user", "content": [{"type": %s, "text": "a"}]}]}' % kind)
      for path in ("/v1/chat/completions", "/v1/messages", "/apply-template")
      for kind in (b"[]", b"{}", b"5", b"null")),
    ("/v1/responses", b'{"input": [{"role": "user", "content": [{"type": {}, "text": "a"}]}]}'),
    ("/completion", b'{"prompt": "x", "json_schema": "{\\"enum\\": [1e400]}"}'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BAD_BODIES)
def test_malformed_requests_give_a_message_and_no_server_error(tiny: TestClient, path: str, body: bytes) -> None:
    response = tiny.post(path, content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"9" * 400 + b".0", b"NaN", b"-Infinity", b"1" * 5000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", b'{"input": "Hi", "max_output_tokens": 2, "metadata": {"a": %s}}'),
        ("/v1/responses", b'{"input": "Hi", "max_output_tokens": 2, "stream": true, "metadata": {"a": %s}}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"a": %s}]}]}'),
        ("/completion", b'{"prompt": "x", "n_predict": 2, "json_schema": {"enum": [%s]}}'),
        ("/lora-adapters", b'[{"id": 0, "scale": %s}]'),
    ],
)
def test_numbers_that_answers_could_not_repeat_are_refused(
    tiny: TestClient, path: str, body: bytes, number: bytes
) -> None:
    response = tiny.post(path, content=body % number)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("the request body is not valid JSON: ") and len(message) < 200


def test_numbers_that_answers_can_repeat_are_taken(tiny: TestClient) -> None:
    body = {"input": "Hi", "max_output_tokens": 1, "metadata": {"a": [1.7e308, -5e-324, 1e-400, 10**400]}}
    assert post(tiny, "/v1/responses", **body)["metadata"] == body["metadata"]


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity"])
def test_numbers_of_written_calls_that_answers_cannot_hold(number: str) -> None:
    call = {"id": "1", "name": "f", "arguments": f'{{"a": {number}}}'}
    blocks = content_blocks(ChatMessage(calls=[call]))
    assert to_json(blocks) == '[{"type":"tool_use","id":"1","name":"f","input":{}}]'
    assert typed_value(number, {"type": "number"}) == number, "text, as every value that is no JSON"


def test_biases_of_more_digits_than_a_vocabulary_needs_have_no_effect(tiny: TestClient) -> None:
    for digits in ("1" * 5001, "99999999999", "9" * 15):
        assert complete(tiny, logit_bias={digits: 100})["content"] == complete(tiny)["content"]


@pytest.mark.parametrize(
    "name", ["temperature", "presence_penalty", "repeat_penalty", "dynatemp_range", "mirostat_tau"]
)
def test_huge_values_are_harmless(tiny: TestClient, name: str) -> None:
    got = complete(tiny, **{"temperature": 1.0, name: 1.7e308, "logit_bias": [[901, 1.7e308], [902, -1.7e308]]})
    assert got["tokens_predicted"] == 6


def test_a_body_over_the_limit_is_refused(tiny: TestClient) -> None:
    response = tiny.post("/tokenize", content=b'{"content": "' + b"a" * (65 << 20) + b'"}')
    assert response.status_code == 413


def test_unsupported_routes_say_what_is_missing(tiny: TestClient) -> None:
    for path, word in (
        ("/rerank", "embeddings"),
        ("/infill", "infill"),
        ("/tools", "tools"),
        ("/v1/streams/lookup", "streams"),
    ):
        error = post(tiny, path, 501)["error"]
        assert error["type"] == "not_supported_error"
        assert word in error["message"]
