"""What one request may make the server do or say: bounds that keep it answering others."""

from __future__ import annotations

import asyncio
import gc
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.testclient import TestClient

from ikpy.engine.grammars import strict_json
from ikpy.server import http, json_turns
from ikpy.server.build import Server
from ikpy.server.context_fit import TOO_LONG, shortened, truncate_prompt
from ikpy.server.front import MOST_TASKS, Front
from ikpy.server.generation import Generation
from ikpy.server.log import ServerLog
from ikpy.server.read_params import LONGEST_BREAKERS, LONGEST_STOPS, MOST_NAMES, MOST_SAMPLERS
from ikpy.server.tasks import CompletionTask
from tests.server.harness import read_events, running, start_server


@pytest.fixture(name="server", scope="module")
def start_tiny() -> Iterator[Server]:
    found = start_server("llama-server -m MODEL -t 1 -c 8192 -np 2 --embeddings --pooling mean")
    yield found
    found.engine.stop(10)


@pytest.fixture(name="shifting", scope="module")
def start_puppet() -> Iterator[Server]:
    """A server whose slots drop old tokens."""
    found = start_server("llama-server -m PUPPET -t 1 -c 2048 -np 2")
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
    error = answer.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


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
    for n in (MOST_SAMPLERS + 1, MOST_NAMES + 1):
        assert f"{n} samplers are too many" in refusal(client, samplers=one * n)


def test_stop_strings_and_breakers_have_a_length(client: TestClient) -> None:
    accepted(client, stop=["x" * (LONGEST_STOPS - 1), "y"])
    assert "stop strings are too long" in refusal(client, stop=["x" * LONGEST_STOPS, "y"])
    accepted(client, dry_sequence_breakers=["x" * LONGEST_BREAKERS])
    assert "dry_sequence_breakers" in refusal(client, dry_sequence_breakers=["x" * LONGEST_BREAKERS, "y"])


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/completion", {"prompt": ["a"] * 64, "stop": ["x" * 60_000]}),
        ("/completion", {"n": 64, "prompt": "\x01" * 10_000}),  # each takes six bytes in JSON
        ("/completion", {"n": 64, "prompt": [300] * 14_000, "stream": True}),
        ("/completion", {"n": 64, "grammar": f'root ::= "{"x" * 60_000}"'}),
        ("/completion", {"n": 64, "json_schema": {"type": "object", "properties": {"x" * 60_000: {}}}}),
        ("/v1/completions", {"n": 64, "prompt": "x" * 60_000, "echo": True}),
        ("/v1/completions", {"prompt": ["x" * 30_000] * 128, "echo": True}),
        ("/v1/responses", {"input": "x", "stream": True, "metadata": {"x": "x" * 1_200_000}}),
    ],
)
def test_what_answers_repeat_of_a_request_is_bounded(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    monkeypatch.setattr("ikpy.server.front.MOST_REPEATED", 3 << 20)
    monkeypatch.setattr(Front, "start", None)  # nothing is generated
    assert "would repeat" in refusal(client, path, **more)


def test_one_answer_may_repeat_its_request(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ikpy.server.front.MOST_REPEATED", 2000)
    assert accepted(client, stop=["x" * 60_000])["generation_settings"]["stop"] == ["x" * 60_000]
    assert "2 MiB" in refusal(client, stop=["x" * 60_000], n=40)


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/embeddings"])
def test_too_many_prompts_are_refused_before_they_are_tokenized(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(server.front, "vocab", None)
    prompts = ["x"] * (MOST_TASKS + 1)
    assert "too many" in refusal(client, path, prompt=prompts, input=prompts)


def test_states_of_all_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several texts; one has a micro-batch at most."""
    with running("llama-server -m MODEL -t 1 -c 512 --embeddings --pooling none") as pooled:
        width = len(pooled.post("/embedding", json={"content": "x"}).json()[0]["embedding"][0])
        monkeypatch.setattr("ikpy.server.routes_embeddings.MOST_NUMBERS", 20 * width)
        assert len(pooled.post("/embedding", json={"content": " the" * 30}).json()[0]["embedding"]) > 20
        assert "at most 20" in refusal(pooled, "/embedding", content=[" the" * 15] * 2)
        assert len(pooled.post("/embedding", json={"content": [" the"] * 4}).json()) == 4


def test_names_of_models_have_a_length(client: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"):
        assert "model has 1001 characters" in refusal(client, path, **chat, input="x", model="x" * 1001)


def test_texts_of_tokens_are_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = client.post("/tokenize", json={"content": " the" * 100}).json()["tokens"]
    monkeypatch.setattr("ikpy.server.routes_native.LONGEST_TEXT", 400)
    assert client.post("/detokenize", json={"tokens": tokens[:50]}).status_code == 200
    assert "divide the tokens" in refusal(client, "/detokenize", tokens=tokens * 2)
    monkeypatch.setattr("ikpy.server.routes_native.MOST_PIECES", 10)
    assert client.post("/tokenize", json={"content": " the" * 100}).status_code == 200
    assert "too many for with_pieces" in refusal(client, "/tokenize", content=" the" * 100, with_pieces=True)


def in_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled with whether bodies were parsed, large answers encoded and texts made in the thread of the event loop."""
    found: list[bool] = []

    def noted(function: Any) -> Any:
        def noting(*args: Any, **more: Any) -> Any:
            found.append(is_loop())
            return function(*args, **more)

        return noting

    monkeypatch.setattr(json_turns, "encode", noted(json_turns.encode))
    monkeypatch.setattr(http, "parse_json", noted(http.parse_json))
    monkeypatch.setattr(http, "parse_large", noted(http.parse_large))
    monkeypatch.setattr(server.front.vocab, "detokenize", noted(server.front.vocab.detokenize))
    return found


def is_loop() -> bool:
    """Whether this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "The", "n_predict": 40, "n_probs": 100}),
        ("/completion", {"prompt": [300] * 3000, "n_predict": 1}),
        ("/completion", {"prompt": ["x" * 60] * 40, "n_predict": 0}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 100}),
        ("/v1/completions", {"prompt": "The", "max_tokens": 40, "logprobs": 100}),
        ("/v1/responses", {"input": "The", "max_output_tokens": 40, "top_logprobs": 100}),
        ("/api/chat", CHAT | {"stream": False, "options": {"num_predict": 40}, "logprobs": True, "top_logprobs": 20}),
        ("/v1/embeddings", {"input": ["x"] * 40}),
        ("/tokenize", {"content": [300] * 3000}),
        ("/tokenize", {"content": " the" * 3000, "with_pieces": True}),
        ("/detokenize", {"tokens": [300] * 3000}),
    ],
)
def test_large_answers_are_made_outside_the_event_loop(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    plain = client.post(path, json=body)
    places = in_loop(server, monkeypatch)
    again = client.post(path, json=body)
    assert again.status_code == 200, again.text[:300]
    assert places[0] and len(places) > 1, "the body is small"
    assert not any(places[1:]), "its answer is large"
    assert again.json().keys() == plain.json().keys() if isinstance(again.json(), dict) else len(plain.json()) == 40


@pytest.mark.parametrize("content", ["x" * (http.LARGE_BODY), ["x"] * 300_000])
def test_large_bodies_are_parsed_outside_the_event_loop(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    places = in_loop(server, monkeypatch)
    assert client.post("/apply-template", json={"messages": [], "x": content}).status_code == 200
    assert not places[0]


def test_what_large_bodies_say_when_they_are_wrong(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LARGE_BODY", 10)
    monkeypatch.setattr(http, "QUICK_VALUES", 10)
    for text in ('{"content": [[1,2,3,4,5,6,7,8,9,10,11,12}', '{"content": [1,2,3,4,5,6,7,8,9,10,11,12, NaN]}'):
        large = client.post("/tokenize", content=text.encode())
        assert large.status_code == 400
        with monkeypatch.context() as patched:
            patched.setattr(http, "LARGE_BODY", 1000)
            assert client.post("/tokenize", content=text.encode()).json() == large.json()
    assert client.post("/tokenize", json={"content": [5] * 30}).json() == {"tokens": [5] * 30}
    monkeypatch.setattr(json_turns, "MOST_CONTAINERS", 10)
    assert "more than 10 arrays and objects" in refusal(client, "/tokenize", content=[{}] * 30)
    assert "more than 10 arrays and objects" in refusal(client, "/tokenize", content=[[]] * 30)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=40,
    )
)
@example([[1, [2, [3, [4, [5, [6, [7, [8]]]]]]]], {}, [], [[]]])
@example(list(range(3 * json_turns.BLOCK + 1)))
@example([{"a": "\ud800"}])
def test_json_in_turns_is_json(value: Any) -> None:
    assert http.to_json_in_turns(value) == http.to_json(value)
    text = http.to_json(value)
    assert "\N{REPLACEMENT CHARACTER}" in text or "\\ud800" not in repr(value)
    assert json.loads(text, cls=json_turns.PatientDecoder) == json.loads(text)


def test_penalty_prompts_are_kept_as_far_as_penalties_see_them(client: TestClient, server: Server) -> None:
    shown = "penalty_prompt_tokens"
    given = [5] * server.front.n_ctx + [300, 301]
    for windows, n in (
        ({"repeat_last_n": 1, "dry_penalty_last_n": 0}, 1),
        ({"repeat_last_n": 2, "dry_penalty_last_n": 3}, 3),
        ({"repeat_last_n": 0, "dry_penalty_last_n": 0}, 0),
        ({"repeat_last_n": -1}, server.front.n_ctx),
        ({"repeat_last_n": 10**9}, server.front.n_ctx),
    ):
        found = accepted(client, penalty_prompt=given, **windows)["generation_settings"]
        assert found[shown] == given[len(given) - n :]
        assert found["use_penalty_prompt_tokens"] is True


def test_long_prompts_are_cut_before_they_wait(shifting: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = TestClient(shifting.app), shifting
    n_ctx = server.engine.n_ctx_slot
    queued: list[int] = []
    submit = server.engine.submit

    def noted(*tasks: Any) -> None:
        queued.extend(len(task.tokens) for task in tasks)
        submit(*tasks)

    monkeypatch.setattr(server.engine, "submit", noted)
    prompt = list(range(300, 400)) * (n_ctx // 10)
    for n_keep in (0, 7, -1):
        cut = accepted(client, prompt=prompt, n_keep=n_keep, n_predict=0)
        kept = n_ctx - 4 if n_keep < 0 else n_keep + server.front.vocab.add_bos
        fitting = truncate_prompt(prompt, n_ctx, kept)
        assert cut["truncated"] and cut["tokens_evaluated"] == len(fitting)
        assert server.engine.slots[cut["id_slot"]].tokens[: len(fitting)] == fitting
    assert max(queued) < 3 * n_ctx
    scored = {"echo": True, "logprobs": 1, "max_tokens": 0}
    assert TOO_LONG in refusal(client, "/v1/completions", prompt=prompt, **scored)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_cut_is_told(shifting: Server, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """In the log, and by a field that other answers of OpenAI's form do not have."""
    client, out, n_ctx = TestClient(shifting.app), io.StringIO(), shifting.engine.n_ctx_slot
    monkeypatch.setattr(shifting.engine, "log", ServerLog("json", out))
    for n, is_cut in ((5, False), (2 * n_ctx, True)):
        for path, body in (
            ("/v1/completions", {"prompt": [300] * n}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": " the" * n}]}),
        ):
            response = client.post(path, json=body | {"max_tokens": 2, "stream": stream})
            data = [event["data"] for event in read_events(response.text)] if stream else [response.json()]
            answers = [found for found in data if found != "[DONE]"]
            assert [found.get("truncated") for found in answers if "timings" in found] == [True if is_cut else None]
    lines = [line for line in map(json.loads, out.getvalue().splitlines()) if line["function"] == "truncate_prompt"]
    assert [line["level"] for line in lines] == ["WARN"] * 2
    assert (lines[0]["n_prompt_tokens"], lines[0]["n_ctx"]) == (2 * n_ctx, n_ctx)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_its_length(server: Server, client: TestClient, stream: bool) -> None:
    """By which clients of llama-server shorten it."""
    n_slot = server.engine.slots[0].fit.n_ctx
    for n in (n_slot, 3 * n_slot + 5):
        for path in ("/completion", "/v1/completions"):
            response = client.post(path, json={"prompt": [300] * n, "max_tokens": 1, "stream": stream})
            assert response.status_code == 400
            assert response.json()["error"] == {
                "code": 400,
                "message": TOO_LONG,
                "type": "exceed_context_size_error",
                "n_prompt_tokens": n,
                "n_ctx": n_slot,
            }


@settings(max_examples=200, deadline=None)
@given(st.integers(5, 60), st.integers(0, 60), st.integers(0, 400))
def test_a_shortened_prompt_is_truncated_like_the_whole(n_ctx: int, n_keep: int, more: int) -> None:
    tokens, n_keep = list(range(n_ctx + more)), min(n_keep, n_ctx - 4)
    short = shortened(tokens, n_ctx, n_keep)
    assert n_ctx <= len(short) <= max(n_ctx + n_ctx, 4 * n_ctx)
    assert truncate_prompt(short, n_ctx, n_keep) == truncate_prompt(tokens, n_ctx, n_keep)


@pytest.mark.parametrize("prompt", [[300] * 40_000, " the" * 40_000])
def test_idle_slots_keep_nothing_of_a_request(shifting: Server, prompt: Any) -> None:
    client, server = TestClient(shifting.app), shifting
    body: dict[str, Any] = {"logit_bias": [[449, 100]], "temperature": 0}
    body |= {"penalty_prompt": [5] * 9000, "n_probs": 3, "id_slot": 0, "n_predict": 2, "banned_strings": ["zz"]}
    answer = accepted(client, prompt=prompt, **body)
    assert answer["prompt"] == prompt and len(answer["completion_probabilities"]) == 2
    slot = server.engine.slots[0]
    task, finished = slot.last_task, slot.finished
    assert isinstance(task, CompletionTask) and finished is not None and slot.answer is not None
    assert (task.tokens, task.sampler, finished.text, finished.tokens, finished.probabilities) == ((), None, "", (), ())
    assert (slot.answer.tokens, slot.answer.probabilities, slot.answer.text) == ([], [], "")
    assert slot.answer.task.prompt is None
    shown = client.get("/slots").json()[0]
    assert shown["prompt"] == prompt[: slot.n_ctx * (16 if isinstance(prompt, str) else 1)]
    assert shown["id_task"] == task.id and shown["next_token"]["n_decoded"] == 2
    gc.collect()
    assert not [item for item in gc.get_objects() if isinstance(item, Generation)]


@pytest.mark.parametrize("end", ["", ",", " ", ", ", ",,1", " 1", "NaN", ",NaN", ",1e400", ",1.5"])
@pytest.mark.parametrize("n", [1, json_turns.BLOCK // 2, json_turns.BLOCK // 2 + 1, 7000, 20_000])
def test_long_lists_are_decoded_in_blocks_like_others(n: int, end: str) -> None:
    text = f'{{"x": [{"1," * (n - 1)}1{end}], "y": 2}}'

    def decode(*more: type[json.JSONDecoder]) -> Any:
        try:
            return strict_json.loads(text, *more)
        except ValueError:
            return None

    assert decode(json_turns.PatientDecoder) == decode()


def test_texts_are_pooled_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with running("llama-server -m MODEL -t 1 -c 512 --embeddings --pooling mean") as client:
        shapes = []
        results = Generation.results

        async def noted(self: Generation, request: Request) -> list[Any]:
            found = await results(self, request)
            shapes.extend(event.vectors.shape for event in found)
            return found

        monkeypatch.setattr(Generation, "results", noted)
        texts = ["the old sea and the long road", "a letter"]
        assert len(client.post("/v1/embeddings", json={"input": texts}).json()["data"]) == 2
        n_embd = client.get("/v1/models").json()["data"][0]["meta"]["n_embd"]
        assert shapes == [(1, n_embd)] * 2, "a thousand texts would keep the states of all their tokens"
