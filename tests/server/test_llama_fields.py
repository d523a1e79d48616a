"""Fields of llama.cpp's server that its clients read and ik_llama.cpp's does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy import __version__
from ikpy.server.errors import error_body
from ikpy.server.http import error_response, named_event
from ikpy.server.routes_anthropic import stream_error
from tests.server.harness import read_events, running

BODY = {"prompt": "The old man looked at", "temperature": 0, "n_predict": 6}
HELLO = [{"role": "user", "content": "Hello there"}]
COMMAND = "llama-server -m MODEL -t 1 -c 2048 -np 2 --metrics"


@pytest.fixture(scope="module")
def tiny() -> Iterator[TestClient]:
    with running(COMMAND) as client:
        yield client


def post(client: TestClient, path: str = "/completion", **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client: TestClient, path: str = "/completion", **body: Any) -> list[Any]:
    return [event["data"] for event in read_events(client.post(path, json=body | {"stream": True}).text)]


def test_answers_say_why_they_end(tiny: TestClient) -> None:
    got = post(tiny, **BODY)
    assert (got["stop_type"], got["index"], got["has_new_line"]) == ("limit", 0, "\n" in got["content"])
    word = post(tiny, **BODY, stop=[got["content"][2:5]])
    assert (word["stop_type"], word["stopping_word"]) == ("word", got["content"][2:5])
    assert post(tiny, **BODY | {"n_predict": 40}, grammar='root ::= " a"')["stop_type"] == "eos"
    assert {post(tiny, **BODY, stop=[f"{i}"])["has_new_line"] for i in range(2)} == {got["has_new_line"]}
    assert post(tiny, **BODY, grammar='root ::= "\\n"')["has_new_line"]


def test_chunks_tell_their_answer_and_tokens(tiny: TestClient) -> None:
    prompts = ["The old man looked at", "Nobody had", "A girl of seven"]
    alone = [post(tiny, **BODY | {"prompt": prompt}, return_tokens=True) for prompt in prompts]
    events = streamed(tiny, **BODY | {"prompt": prompts})
    for i, want in enumerate(alone):
        own = [event for event in events if event["index"] == i]
        assert [token for event in own for token in event["tokens"]] == want["tokens"], i
        assert "".join(event["content"] for event in own) == want["content"], i
        counts = [event["tokens_predicted"] for event in own[:-1]]
        assert counts == sorted(counts) and counts[-1] == own[-1]["tokens_predicted"] == len(want["tokens"])
        assert {event["tokens_evaluated"] for event in own} == {want["tokens_evaluated"]}
        assert own[-1]["stop"] and own[-1]["tokens"] == []


def test_chunks_of_a_held_back_beginning_have_all_tokens(tiny: TestClient) -> None:
    want = post(tiny, **BODY, return_tokens=True)
    events = streamed(tiny, **BODY, stop=[want["content"] + "?"])
    assert [token for event in events for token in event["tokens"]] == want["tokens"]


def test_timings_tell_what_was_cached(tiny: TestClient) -> None:
    body = BODY | {"prompt": "Whatever the captain said to them about it, they", "n_predict": 2}
    first, again = post(tiny, **body)["timings"], post(tiny, **body)["timings"]
    n_prompt = first["cache_n"] + first["prompt_n"]
    assert again["prompt_n"] == 1 and again["cache_n"] == n_prompt - 1
    chat = post(tiny, "/v1/chat/completions", messages=HELLO, max_tokens=2)
    assert chat["timings"]["cache_n"] == chat["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert post(tiny, **body, cache_prompt=False)["timings"]["cache_n"] == 0


@pytest.mark.parametrize("post_sampling", [False, True])
def test_probabilities_have_both_forms(tiny: TestClient, post_sampling: bool) -> None:
    body = BODY | {"n_probs": 3, "post_sampling_probs": post_sampling, "return_tokens": True, "temperature": 0.5}
    got = post(tiny, **body, seed=1)
    own, top = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")
    assert [item["id"] for item in got["completion_probabilities"]] == got["tokens"]
    for item in got["completion_probabilities"]:
        assert bytes(item["bytes"]).decode() == item["token"] == item["content"]
        assert [x["token"] for x in item[top]] == [x["tok_str"] for x in item["probs"]]
        values = [x[own] if post_sampling else math.exp(x[own]) for x in item[top]]
        assert values == pytest.approx([x["prob"] for x in item["probs"]])
        assert item[own] in [x[own] for x in item[top]] or item["id"] not in [x["id"] for x in item[top]]
    chunks = streamed(tiny, **body, seed=1)[:-1]
    assert [item for chunk in chunks for item in chunk["completion_probabilities"]] == got["completion_probabilities"]


def test_answers_name_the_program(tiny: TestClient) -> None:
    build = tiny.get("/props").json()["build_info"]
    assert build.endswith(__version__)
    for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})):
        assert post(tiny, path, **body, max_tokens=2)["system_fingerprint"] == build
        chunks = streamed(tiny, path, **body, max_tokens=2)
        assert {chunk["system_fingerprint"] for chunk in chunks if chunk != "[DONE]"} == {build}


def test_properties(tiny: TestClient) -> None:
    props = tiny.get("/props").json()
    shown = props["default_generation_settings"]
    assert shown["params"] == {name: value for name, value in shown.items() if name != "params"}
    assert (props["endpoint_slots"], props["endpoint_metrics"], props["endpoint_props"]) == (True, True, False)
    assert (props["model_ftype"], props["is_sleeping"], props["ui"]) == ("F16", False, True)
    can = props["chat_template_caps"]
    assert can["supports_system_role"] and can["supports_string_content"]
    assert not (can["supports_tools"] or can["supports_tool_calls"] or can["supports_typed_content"])


def test_capabilities_are_those_of_the_template(tmp_path: Path) -> None:
    file = tmp_path / "hermes.jinja"
    file.write_text("{% for m in messages %}{{ m.content[0].text }}{% endfor %}{{ tools }}<tool_call>")
    with running(f"{COMMAND} --chat-template-file {file}") as client:
        can = client.get("/props").json()["chat_template_caps"]
        assert can["supports_typed_content"] and can["supports_tools"]
        assert not (can["supports_parallel_tool_calls"] or can["supports_preserve_reasoning"])
    with running("llama-server -m PUPPET -t 1 -c 512 -np 1") as client:
        props = client.get("/props").json()
        can = props["chat_template_caps"]
        assert can["supports_parallel_tool_calls"] and can["supports_preserve_reasoning"]
        assert not can["supports_reasoning_effort"] and props["modalities"]["video"] is False


def test_lists_of_models(tiny: TestClient) -> None:
    found = tiny.get("/v1/models").json()
    (entry,), (listed,) = found["data"], found["models"]
    assert entry["meta"]["n_ctx"] == entry["max_model_len"] == 1024
    assert entry["meta"]["ftype"] == "F16" and entry["aliases"] == [entry["id"]]
    assert entry["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    assert (listed["name"], listed["model"], listed["capabilities"]) == (entry["id"], entry["id"], ["completion"])


def test_slots(tiny: TestClient) -> None:
    got = post(tiny, **BODY, id_slot=1)
    slot = tiny.get("/slots").json()[1]
    assert (slot["is_processing"], slot["speculative"]) == (False, False)
    assert slot["params"]["max_tokens"] == BODY["n_predict"] == slot["max_tokens"]
    assert slot["n_prompt_tokens"] == got["tokens_cached"]
    assert slot["n_prompt_tokens_cache"] + slot["n_prompt_tokens_processed"] == got["tokens_evaluated"]


def metrics(client: TestClient) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_metrics() -> None:
    with running(COMMAND) as client:
        got = [post(client, **BODY) for _ in range(2)]
        found = {name.removeprefix("llamacpp:"): value for name, value in metrics(client).items()}
    assert found["prompt_tokens_cached_total"] == sum(answer["timings"]["cache_n"] for answer in got)
    assert found["prompt_tokens_total"] == sum(answer["timings"]["prompt_n"] for answer in got)
    assert found["n_decode_total"] == 2 * BODY["n_predict"]  # one of the prompt, one of each token but the last
    assert found["n_tokens_max"] == got[0]["tokens_cached"] and found["n_busy_slots_per_decode"] == 1
    assert found["spec_decode_num_drafts_total"] == 0


def test_metrics_of_drafts() -> None:
    options = "--spec-type suffix --suffix-pattern-len 1 --draft-p-min 0.1"
    with running(f"{COMMAND} {options}") as client:
        got = post(client, **BODY | {"n_predict": 200})
        assert client.get("/slots").json()[0]["speculative"]
        found = {name.removeprefix("llamacpp:"): value for name, value in metrics(client).items()}
    assert 0 < found["spec_decode_num_drafts_total"] <= found["spec_decode_num_draft_tokens_total"]
    assert found["spec_decode_num_draft_tokens_total"] == got["timings"]["draft_n"]
    assert found["spec_decode_num_accepted_tokens_total"] == got["timings"]["draft_n_accepted"] > 0


def test_errors_of_messages_have_anthropics_form(tiny: TestClient) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        got = tiny.post(path, json={"messages": 5}).json()
        assert (got["type"], got["error"]["type"]) == ("error", "invalid_request_error")
    assert "type" not in tiny.post("/v1/chat/completions", json={"messages": 5}).json()


@pytest.mark.parametrize(
    ("code", "kind"),
    [(400, "invalid_request_error"), (413, "request_too_large"), (500, "api_error"), (503, "overloaded_error")],
)
def test_errors_of_messages_are_the_same_in_streams(code: int, kind: str) -> None:
    whole = json.loads(bytes(error_response({"path": "/v1/messages"}, error_body(code, "x"), code).body))
    assert whole["error"] == {"code": code, "message": "x", "type": kind}
    assert stream_error(code, "x") == named_event("error", whole)


def test_claude_code_finds_that_a_conversation_is_too_long() -> None:
    with running(f"{COMMAND} --context-shift off") as client:
        body = {"messages": [{"role": "user", "content": "sea " * 3000}], "max_tokens": 2}
        error = client.post("/v1/messages", json=body).json()["error"]
        n_prompt = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        assert f"prompt is too long: {n_prompt} tokens > 1024 maximum" in error["message"]
        assert error["type"] == "invalid_request_error"
        chat = client.post("/v1/chat/completions", json=body).json()["error"]
        assert chat["type"] == "exceed_context_size_error" and "prompt is too long" not in chat["message"]


def test_a_list_of_one_prompt_is_one_answer(tiny: TestClient) -> None:
    got, alone = post(tiny, **BODY | {"prompt": [BODY["prompt"]]}), post(tiny, **BODY)
    assert (got["content"], got["prompt"]) == (alone["content"], BODY["prompt"])
    assert post(tiny, **BODY | {"prompt": [[4090, 464]]})["tokens_evaluated"] == 2
    assert len(post(tiny, **BODY | {"prompt": [BODY["prompt"]], "n": 2})) == 2


@pytest.mark.parametrize(
    ("limits", "n"),
    [({"max_tokens": 4, "max_completion_tokens": 2}, 2), ({"n_predict": 3, "max_tokens": 4}, 3),
     ({"n_predict": 3, "max_completion_tokens": 2}, 3), ({"max_tokens": 4, "max_completion_tokens": None}, 4)],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_which_limit_holds(tiny: TestClient, path: str, limits: dict[str, Any], n: int) -> None:
    got = post(tiny, path, prompt="The old man", messages=HELLO, **limits)
    assert (got["usage"]["completion_tokens"] if "usage" in got else got["tokens_predicted"]) == n


def test_n_probs_of_chats(tiny: TestClient) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "temperature": 0}
    shown = post(tiny, "/v1/chat/completions", **body, n_probs=3)["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in shown] == [3, 3]
    assert "logprobs" not in post(tiny, "/v1/chat/completions", **body)["choices"][0]


def test_the_last_event_of_responses_has_the_timings(tiny: TestClient) -> None:
    last = streamed(tiny, "/v1/responses", input="Hello", max_output_tokens=3)[-1]
    assert last["type"] == "response.incomplete" and last["timings"]["predicted_n"] == 3


def test_settings_say_whether_a_grammar_waits_and_which_scales_hold(tiny: TestClient) -> None:
    shown = post(tiny, **BODY, lora=[{"id": 0, "scale": 0.5}])["generation_settings"]
    assert shown["lora"] == [{"id": 0, "scale": 0.5}] and shown["grammar_lazy"] is False
