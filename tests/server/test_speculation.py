"""Servers with drafters answer as servers without, and count their guesses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from ikpy.server.params import read_generation
from ikpy.server.tasks import CompletionTask
from tests.server.harness import MODELS, read_events, running, start_server
from tests.server.live import wait_for

COMMAND = "llama-server -m MODEL -t 1 -c 2048 -np 2"
DRAFTERS = "--spec-type ngram-mod,suffix --spec-ngram-size-n 2 --draft-p-min 0.2 --suffix-pattern-len 1 --draft-max 6"
PROMPTS = ["one two, and the powers of the powers of the", "The old man looked at", "the sea, the sea, the sea,"]
VARYING = {"timings", "id_slot"}


@pytest.fixture(scope="module")
def plain() -> Iterator[TestClient]:
    with running(COMMAND) as client:
        yield client


@pytest.fixture(scope="module", params=[DRAFTERS, f"-md {MODELS['MODEL']} --draft-p-min 0.1 -cd 256"])
def drafting(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    with running(f"{COMMAND} {request.param}") as client:
        yield client


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/completion", json={"n_predict": 40, "temperature": 0, "seed": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"temperature": 0.7, "top_k": 5, "seed": 11},
        {"stop": ["of"]},
        {"n_predict": 1},
        {"grammar": 'root ::= ("the " | "of ")+'},
        {"n_probs": 2, "n_predict": 9},
        {"repeat_penalty": 1.3},
    ],
    ids=str,
)
def test_answers_are_those_of_a_plain_server(plain: TestClient, drafting: TestClient, body: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        wanted, got = complete(plain, prompt=prompt, **body), complete(drafting, prompt=prompt, **body)
        for key in wanted.keys() - VARYING - {"completion_probabilities"}:
            assert got[key] == wanted[key], f"{key} of {prompt!r}"
        for ours, theirs in zip(
            got.get("completion_probabilities", []), wanted.get("completion_probabilities", []), strict=True
        ):
            assert ours["content"] == theirs["content"]
        timings = got["timings"]
        assert "draft_n" not in wanted["timings"] and 0 <= timings["draft_n_accepted"] <= timings["draft_n"]
        assert timings["predicted_n"] == wanted["timings"]["predicted_n"]
        assert timings["n_past"] == wanted["timings"]["n_past"]


def test_guesses_are_made_and_limited_by_the_request(drafting: TestClient) -> None:
    assert complete(drafting, prompt=PROMPTS[0])["timings"]["draft_n_accepted"] > 3
    assert complete(drafting, prompt=PROMPTS[0], **{"speculative.n_max": 0})["timings"]["draft_n"] == 0
    assert complete(drafting, prompt=PROMPTS[0], **{"speculative.n_min": 50})["timings"]["draft_n"] == 0


def test_slots_guess_side_by_side(plain: TestClient, drafting: TestClient) -> None:
    """Several requests at once, streamed: each has its own guesses and its own text."""

    def text(client: TestClient, prompt: str) -> str:
        body = {"prompt": prompt, "n_predict": 48, "temperature": 0, "stream": True}
        events = read_events(client.post("/completion", json=body).text)
        return "".join(event["data"]["content"] for event in events)

    wanted = [text(plain, prompt) for prompt in PROMPTS]
    assert all(len(found) > 100 for found in wanted)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            assert list(pool.map(lambda p: text(drafting, p), PROMPTS)) == wanted


def test_context_shifts_happen_at_the_same_token() -> None:
    """The latent cache cannot shift: a full context ends both servers' answers alike."""
    with (
        running("llama-server -m MODEL -t 1 -c 256 -np 1") as a,
        running(f"llama-server -m MODEL -t 1 -c 256 -np 1 {DRAFTERS}") as b,
    ):
        answers = [
            client.post("/completion", json={"prompt": PROMPTS[0], "n_predict": 400, "temperature": 0})
            for client in (a, b)
        ]
        assert answers[0].status_code == answers[1].status_code == 400
        assert answers[0].json() == answers[1].json()


def test_guesses_of_a_cancelled_request_leave_the_cache() -> None:
    """A request cancelled while its guesses are evaluated leaves nothing behind the tokens that its slot keeps."""
    server = start_server(f"{COMMAND} {DRAFTERS}")
    engine, front = server.engine, server.front
    decode, cut = engine.context.decode, []

    def cancelling(batch: Any) -> Any:
        for slot in engine.slots:
            if slot.task is not None and slot.draft and not cut:
                engine.cancel(slot.task)
                cut.append(slot)
        return decode(batch)

    engine.context.decode = cancelling  # type: ignore[method-assign]
    params = read_generation({"n_predict": 40, "temperature": 0}, front.settings, front.vocab, 2)
    tokens = front.vocab.tokenize(PROMPTS[0], add_special=True)
    try:
        engine.submit(CompletionTask(tokens, lambda event: None, params=params, sampler=front.sampler(params)))
        assert wait_for(lambda: engine.n_idle == 2 and not engine.n_deferred)
    finally:
        engine.stop(10)
    (slot,) = cut
    assert engine.context.kv.seq_pos_max(slot.id) == len(slot.tokens) - 1
