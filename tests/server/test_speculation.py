"""Servers with drafters answer as servers without, and count their guesses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from ikpy.engine import ngram_cache
from ikpy.engine.head_draft import HeadDraft
from ikpy.errors import UsageError
from ikpy.server.build import Server
from ikpy.server.log import ServerLog
from ikpy.server.read_params import read_generation
from ikpy.server.tasks import CompletionTask
from tests.cpu.models.prediction_models import mimo2
from tests.cpu.models.reference_models import N_VOCAB
from tests.cpu.models.test_prediction_head import glm4moe, right_head
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


def test_least_probability_of_a_request() -> None:
    """Replaces the server's for one request; null is not given."""

    def drafted(client: TestClient, p_min: object) -> int:
        return complete(client, prompt=PROMPTS[0], **{"speculative.p_min": p_min})["timings"]["draft_n"]

    with running(f"{COMMAND} -md {MODELS['MODEL']} -cd 256 --draft-p-min 0.1 --draft-max 4") as client:
        default = complete(client, prompt=PROMPTS[0])["timings"]["draft_n"]
        assert drafted(client, 0) > drafted(client, 0.1) == default == drafted(client, None)
        assert default > drafted(client, 0.5) >= drafted(client, 0.999) == 0
    with running(f"{COMMAND} --spec-type suffix --suffix-pattern-len 1 --draft-p-min 0.1") as client:
        assert drafted(client, 0.1) > drafted(client, 1.5) == 0


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
        plain, drafting = (answer.json() for answer in answers)
        assert plain["stopped_limit"] and plain["truncated"] and plain["tokens_cached"] == 255
        fields = ("content", "stopped_limit", "truncated", "tokens_predicted", "tokens_cached")
        assert [drafting[name] for name in fields] == [plain[name] for name in fields]


def test_guesses_of_a_cancelled_request_leave_the_cache() -> None:
    """A request cancelled while its guesses are evaluated leaves nothing behind the tokens that its slot keeps."""
    server = start_server(f"{COMMAND} {DRAFTERS}")
    engine, front = server.engine, server.front
    decode, cut = engine.context.decode, []

    def cancelling(batch: Any, *, copy: bool) -> Any:
        for slot in engine.slots:
            if slot.task is not None and slot.draft and not cut:
                engine.cancel(slot.task)
                cut.append(slot)
        return decode(batch, copy=copy)

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


@pytest.fixture(scope="module", params=["random", "right", "turns"])
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TestClient]]:
    """A plain server and one that drafts, of a model with a prediction layer that is random or always right, or with
    two that take turns.
    """
    makers = {
        "random": lambda: glm4moe(own_matrices=True),
        "right": lambda: right_head(glm4moe(own_matrices=False)),
        "turns": lambda: mimo2().model,
    }
    model = makers[request.param]()
    model.words = [f"w{i}" for i in range(N_VOCAB - 8)]
    name = f"HEAD-{request.param}"
    MODELS[name] = str(model.write(tmp_path_factory.mktemp("heads") / "model.gguf"))
    command = f"llama-server -m {name} -t 1 -c 1536 -np 3 -ctk f32 -ctv f32 -b 64 -ub 32"
    with running(command) as plain, running(f"{command} -mtp --draft-p-min 0 --draft-max 3") as drafting:
        yield [plain, drafting]


def texts_of_heads(n: int, common: int) -> list[list[int]]:
    """Prompts of 40 tokens with a common beginning."""
    random = np.random.default_rng(4)
    first = random.integers(4, N_VOCAB - 8, common).tolist()
    return [[*first, *random.integers(4, N_VOCAB - 8, 40 - common).tolist()] for _ in range(n)]


def test_prediction_heads_draft_in_every_slot(heads: list[TestClient], request: pytest.FixtureRequest) -> None:
    """Several requests at once, with shared beginnings, and second turns: the texts are those of the plain server."""
    plain, drafting = heads
    right = request.node.callspec.params["heads"] == "right"
    prompts = texts_of_heads(3, 0) + texts_of_heads(3, 24)
    body = {"n_predict": 40, "ignore_eos": True}
    for turn in range(2):
        wanted = [complete(plain, prompt=prompt, **body) for prompt in prompts]
        with ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda prompt: complete(drafting, prompt=prompt, **body), prompts))
        assert [answer["content"] for answer in got] == [answer["content"] for answer in wanted]
        timings = [answer["timings"] for answer in got]
        assert all(t["draft_n"] >= 25 and 0 <= t["draft_n_accepted"] <= t["draft_n"] for t in timings)
        if right:
            # 9 rounds of 3 guesses, then 2; the head leaves out a norm, which may decide between nearly equal tokens.
            assert all(t["draft_n_accepted"] >= 28 and t["draft_n"] - t["draft_n_accepted"] < 3 for t in timings)
        else:
            assert sum(t["draft_n"] - t["draft_n_accepted"] for t in timings) > 0
        words = [[int(word) + 4 for word in re.findall(r"w(\d+)", answer["content"])] for answer in wanted]
        prompts = [[*prompt, *found, 5 + turn] for prompt, found in zip(prompts, words, strict=True)]


def test_prediction_heads_and_context_shifts(heads: list[TestClient], request: pytest.FixtureRequest) -> None:
    """A slot of 128 tokens is full several times; the text stays that of a server without guesses."""
    name = f"HEAD-{request.node.callspec.params['heads']}"
    command = f"llama-server -m {name} -t 1 -c 256 -np 2 -ctk f32 -ctv f32"
    body = {"prompt": texts_of_heads(1, 0)[0], "n_predict": 250, "ignore_eos": True, "n_keep": 8}
    with running(command) as plain, running(f"{command} -mtp --draft-p-min 0 --draft-max 3 -cd 256") as drafting:
        wanted, got = complete(plain, **body), complete(drafting, **body)
        assert complete(plain, **body, n_discard=-1)["content"] == wanted["content"]
    assert wanted["truncated"] and got["truncated"]
    assert got["content"] == wanted["content"]
    assert got["timings"]["draft_n"] > 150


def test_requests_decide_about_prediction_heads(heads: list[TestClient]) -> None:
    """Without guesses for a request the head sees nothing of it, and goes on with the next one."""
    plain, drafting = heads
    prompt = texts_of_heads(1, 0)[0]
    body = {"prompt": prompt, "n_predict": 20, "ignore_eos": True, "id_slot": 1}
    wanted = complete(plain, **body)
    off = complete(drafting, **body, **{"speculative.n_max": 0})
    assert off["timings"]["draft_n"] == 0 and off["content"] == wanted["content"]
    banned = complete(drafting, **body, banned_strings=["no such text"])
    assert banned["timings"]["draft_n"] == 0 and banned["content"] == wanted["content"]
    on = complete(drafting, **body)
    assert on["timings"]["draft_n"] > 5 and on["content"] == wanted["content"]


def head_entries(server: Server) -> set[int]:
    """Positions that the head's cache holds for the text of the only slot."""
    (slot,) = server.engine.slots
    assert slot.speculator is not None
    (drafter,) = slot.speculator.drafters
    assert isinstance(drafter, HeadDraft)
    return server.engine.call(lambda: set(drafter._contexts[0].kv.pos.tolist()) - {-1}).result()


def test_a_lookup_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says so when the server has ended, and the statistics follow for all slots."""
    monkeypatch.setattr(ngram_cache, "replacing", lambda path: (_ for _ in ()).throw(OSError(28, "no space")))
    command = f"{COMMAND} --spec-type ngram-cache -lcd {tmp_path}/cache.bin"
    server = start_server(command, tmp_path)
    server.engine.log = ServerLog("json", log := io.StringIO(), log)
    with ThreadPoolExecutor() as pool:
        client = TestClient(server.app, raise_server_exceptions=False)
        list(pool.map(lambda prompt: complete(client, prompt=prompt), PROMPTS[:2]))
    server.engine.stop(10)
    server.engine.finish_drafts()
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    said = [line for line in lines if line["function"] == "finish_drafts"]
    assert [(line["level"], line["error"]) for line in said] == [
        ("WARN", f"cannot write lookup cache '{tmp_path}/cache.bin': no space")
    ]


def test_prediction_heads_know_restored_texts(
    heads: list[TestClient], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """From host memory, and from a slot file in another process; renamed and deleted files take theirs along."""
    name = f"HEAD-{request.node.callspec.params['heads']}"
    command = f"llama-server -m {name} -t 1 -c 256 -np 1 -ctk f32 -ctv f32 -mtp --draft-p-min 0 --draft-max 3"
    command += " --slot-save-path x"
    prompt, other = texts_of_heads(2, 0)
    body = {"n_predict": 20, "ignore_eos": True}
    server = start_server(command, tmp_path)
    try:
        client = TestClient(server.app, raise_server_exceptions=False)
        answer = complete(client, prompt=prompt, **body)
        text = list(server.engine.slots[0].tokens)
        client.post("/slots/0?action=save", json={"filename": "old"}).raise_for_status()
        renamed = client.post("/rename_prompt", json={"old_filename": "old", "new_filename": "text"})
        renamed.raise_for_status()
        complete(client, prompt=other, **body)
        again = complete(client, prompt=[*text, 7], **body)
        assert again["timings"]["prompt_n"] < 4, "the text was in host memory"
        assert head_entries(server) >= set(range(len(text) - 2))
    finally:
        server.engine.stop(10)
    second = [".text.mtp.1"] if name == "HEAD-turns" else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".text.mtp", *second, "text", "text.tokens.json"]
    server = start_server(command, tmp_path)
    server.engine.log = ServerLog("json", log := io.StringIO())
    try:
        client = TestClient(server.app, raise_server_exceptions=False)
        client.post("/slots/0?action=restore", json={"filename": "text"}).raise_for_status()
        restored = complete(client, prompt=[*text, 7], **body)
        assert restored["content"] == again["content"] and restored["timings"]["prompt_n"] < 4
        assert head_entries(server) >= set(range(len(text) - 2))
        assert "drafter's cache not restored" not in log.getvalue()
        (tmp_path / ".text.mtp").write_bytes(b"damaged")
        client.post("/slots/0?action=restore", json={"filename": "text"}).raise_for_status()
        assert "drafter's cache not restored" in log.getvalue()
        assert complete(client, prompt=[*text, 7], **body)["content"] == again["content"]
        client.post("/delete_prompt", json={"filename": "text"}).raise_for_status()
    finally:
        server.engine.stop(10)
    assert not list(tmp_path.iterdir()) and answer["timings"]["draft_n"] > 0


def test_models_without_prediction_heads() -> None:
    with pytest.raises(UsageError, match="no layers that predict further tokens"), running(f"{COMMAND} -mtp"):
        pass
