"""A server whose model has recurrent layers: prompts that part from a slot's text go on from checkpoints."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.models.recurrent_model import MODELS, text, write_model
from tests.server import harness
from tests.server.live import listening

WORDS = [[token, False] for token in range(4)]
"""Bias of the special tokens: answers are words, whose numbers are tokens."""
TINY = "llama-server -m RECURRENT -t 1 -tb 1 -c 1024 -fa on"


@pytest.fixture(scope="module", params=MODELS)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(arch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model"), arch=arch))


@pytest.fixture(scope="module")
def other_model(arch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other weights and the same vocabulary."""
    return str(write_model(tmp_path_factory.mktemp("other"), seed=62, arch=arch))


@pytest.fixture(autouse=True)
def named_model(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(harness.MODELS, "RECURRENT", model)


def reused(client: Any, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    """Tokens of a greedy answer and the number of prompt tokens that were not evaluated."""
    body = {"prompt": prompt, "n_predict": 12, "temperature": 0, "logit_bias": WORDS, **more}
    answer = client.post("/completion", json=body).raise_for_status().json()
    return [int(word) for word in re.findall("[0-9]+", answer["content"])], answer["tokens_evaluated"] - answer[
        "timings"
    ]["prompt_n"]


def test_what_follows_a_text_goes_on_from_its_end() -> None:
    with listening(f"{TINY} -np 1") as (client, _):
        prompt = text(40, 30)
        answer, n = reused(client, prompt)
        assert n == 0
        longer = prompt + answer + text(41, 5)
        followed, n = reused(client, longer)
        assert n == len(prompt) + len(answer) - 1, "the last token of the answer was not evaluated"
        assert followed == reused(client, longer, cache_prompt=False)[0]


def test_a_prompt_that_parts_goes_on_from_the_checkpoint_before_its_end() -> None:
    with listening(f"{TINY} -np 1") as (client, _):
        prompt = text(42, 40)
        first, _ = reused(client, prompt)
        assert reused(client, prompt) == (first, 35), "the same prompt"
        other = prompt[:36] + text(43, 10)
        answer, n = reused(client, other)
        assert n == 35
        assert answer == reused(client, other, cache_prompt=False)[0]
    with listening(f"{TINY} -np 1 -ctx-ckpt 0") as (client, _):
        reused(client, prompt)
        assert reused(client, prompt) == (first, 0)
    with listening(f"{TINY} -np 1 -ctx-ckpt-t 20") as (client, _):
        reused(client, prompt)
        assert reused(client, prompt) == (first, 20)


def test_checkpoints_every_so_many_tokens() -> None:
    with listening(f"{TINY} -np 1 -b 32 -ub 32 -ctx-ckpt-i 32 -ctx-ckpt 3") as (client, server):
        prompt = text(44, 150)
        reused(client, prompt)
        states = server.engine.context.kv.recurrent
        assert [saved.end for saved in states.checkpoints[0]] == [64, 96, 145]
        other = prompt[:100] + text(45, 20)
        answer, n = reused(client, other)
        assert n == 96
        assert answer == reused(client, other, cache_prompt=False)[0]
        reused(client, other, n_predict=60)
        assert len(states.checkpoints[0]) == 3


def test_slots_share_what_a_checkpoint_holds() -> None:
    with listening(f"{TINY} -np 3") as (client, _):
        prompt = text(46, 60)
        first, _ = reused(client, prompt, id_slot=0)
        assert reused(client, prompt, id_slot=1) == (first, 55)
        other = prompt[:57] + text(47, 6)
        answer, n = reused(client, other, id_slot=2)
        assert n == 55
        assert answer == reused(client, other, cache_prompt=False, id_slot=2)[0]


def test_several_answers_to_one_prompt() -> None:
    with listening(f"{TINY} -np 4") as (client, _):
        body = {"prompt": text(48, 50), "max_tokens": 6, "n": 3, "temperature": 0, "ignore_eos": True}
        choices = client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        assert len(choices) == 3 and len({choice["text"] for choice in choices}) == 1


def test_a_text_whose_slot_was_taken_comes_back(arch: str) -> None:
    # What was put away of a window is what the next token needs, too little for an earlier checkpoint.
    full = " --swa-full" if arch in ("glm5-next", "qwen4exp") else ""
    with listening(f"{TINY} -np 1{full}") as (client, server):
        prompt, other = text(49, 60), text(50, 60)
        first, _ = reused(client, prompt)
        reused(client, other)
        assert reused(client, prompt) == (first, 55)
        assert server.engine.prompt_cache.n_hits == 1


def test_slot_files(tmp_path: Path) -> None:
    server = harness.start_server(f"{TINY} -np 2 --slot-save-path DIR", tmp_path)
    try:
        client = harness.TestClient(server.app, raise_server_exceptions=False)
        prompt = text(51, 40)
        answer, _ = reused(client, prompt, id_slot=0)
        assert client.post("/slots/0?action=save", json={"filename": "x"}).json()["n_saved"] == 51
        client.post("/slots/0?action=erase")
        assert client.post("/slots/1?action=restore", json={"filename": "x"}).json()["n_restored"] == 51
        longer = prompt + answer + text(52, 3)
        followed, n = reused(client, longer, id_slot=1)
        assert n == 51
        assert followed == reused(client, longer, id_slot=0, cache_prompt=False)[0]
    finally:
        server.engine.stop(10)


def test_a_full_context_ends_the_answer() -> None:
    with listening(f"{TINY.replace('1024', '256')} -np 1") as (client, _):
        body = {"prompt": text(53, 240), "n_predict": 100, "temperature": 0, "ignore_eos": True}
        answer = client.post("/completion", json=body).raise_for_status().json()
        assert answer["stopped_limit"] and answer["truncated"]
        assert reused(client, text(54, 20))[1] == 0, "the next prompt is served"


def test_answers_with_drafts_are_those_without(model: str, other_model: str) -> None:
    """Also of two slots at once, and of what follows: guesses that were wrong are gone from the states. A draft model
    that is the model itself is right nearly always, another one nearly never."""
    prompts = [text(seed, n) for seed, n in ((55, 30), (56, 41))]
    with listening(f"{TINY} -np 2") as (client, _):
        plain = [reused(client, prompt, n_predict=40, id_slot=i)[0] for i, prompt in enumerate(prompts)]
    for drafter, more in ((model, ""), (other_model, "-ctx-ckpt-i 8")):
        command = f"{TINY} -np 2 --spec-type draft -md {drafter} --draft-max 6 --draft-p-min 0 {more}"
        with listening(command) as (client, server):
            with ThreadPoolExecutor(2) as pool:
                found = pool.map(lambda i: reused(client, prompts[i], n_predict=40, id_slot=i)[0], range(2))
                assert list(found) == plain, command
            drafted = [slot.speculator.n_drafted for slot in server.engine.slots]
            accepted = [slot.speculator.n_accepted for slot in server.engine.slots]
            assert min(drafted) > 20
            share = sum(accepted) / sum(drafted)
            assert share > 0.7 if drafter == model else share < 0.3
            beside = prompts[1] + plain[1][:-2] + text(58, 5)
            parted, _ = reused(client, beside, id_slot=0)
            assert parted == reused(client, beside, id_slot=0, cache_prompt=False)[0], "behind a copy of the other slot"
            longer = prompts[1] + plain[1] + text(57, 5)
            followed, n = reused(client, longer, id_slot=1)
            assert n == len(prompts[1]) + len(plain[1]) - 1
            assert followed == reused(client, longer, id_slot=0, cache_prompt=False)[0]
