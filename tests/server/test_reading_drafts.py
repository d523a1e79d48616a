"""Servers with drafters that read a model answer as servers without, slot by slot, and tidy up behind cancelled
requests.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from ikpy.server.read_params import read_generation
from ikpy.server.tasks import CompletionTask
from tests.cpu.models import dflash_model as dflash
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models import gemma4_assistant_model as assistant
from tests.cpu.models.reference_models import N_VOCAB
from tests.server.harness import MODELS, running, start_server
from tests.server.live import wait_for

NAME = "READ-MODEL"
PROMPTS = np.random.default_rng(4).integers(4, N_VOCAB - 8, (4, 30)).tolist()


PAIRS = {
    "eagle3": lambda: (eagle3.target(), eagle3.drafter(own=True)),
    "dflash": lambda: (eagle3.target(), dflash.drafter()),
    "dspark": lambda: (eagle3.target(), dflash.drafter(own=True, markov="bonus")),
    "mtp": lambda: (assistant.target(), assistant.drafter()),
}


@pytest.fixture(params=PAIRS)
def command(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Options of a server, and those of its drafts."""
    target, drafter = PAIRS[request.param]()
    MODELS[NAME] = str(target.write(tmp_path / "model.gguf"))
    draft = drafter.write(tmp_path / "draft.gguf")
    server = f"llama-server -m {NAME} -t 1 -ctk f32 -ctv f32 -b 64 -ub 32"
    return server, f"-md {draft} --spec-type {request.param} --draft-p-min 0 --draft-max 3"


def complete(client: TestClient, prompt: list[int], **body: Any) -> dict[str, Any]:
    """The answer; the end of the text is no reason to stop."""
    asked = {"prompt": prompt, "n_predict": 40, "ignore_eos": True, "temperature": 0, "seed": 1, **body}
    response = client.post("/completion", json=asked)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 6, "seed": 7}], ids=["greedy", "sampled"])
def test_slots_side_by_side(sampling: dict[str, Any], command: tuple[str, str]) -> None:
    server, drafts = command
    with running(f"{server} -c 768 -np 3") as plain, running(f"{server} -c 768 -np 3 {drafts}") as drafting:
        wanted = [complete(plain, prompt, **sampling) for prompt in PROMPTS]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(2):
                got = list(pool.map(lambda prompt: complete(drafting, prompt, **sampling), PROMPTS))
                assert [answer["content"] for answer in got] == [answer["content"] for answer in wanted]
                timings = [answer["timings"] for answer in got]
                assert all(t["draft_n"] > 25 and 0 <= t["draft_n_accepted"] <= t["draft_n"] for t in timings)


def test_full_slots(command: tuple[str, str]) -> None:
    """A slot of 128 tokens is full several times."""
    server, drafts = command
    options, body = "-c 256 -np 2", {"n_predict": 250, "n_keep": 8}
    with running(f"{server} {options}") as plain, running(f"{server} {options} {drafts} -cd 256") as drafting:
        wanted, got = (complete(client, PROMPTS[0], **body) for client in (plain, drafting))
    assert wanted["truncated"] and got["truncated"]
    assert got["content"] == wanted["content"] and got["timings"]["draft_n"] > 150


def test_saved_slots(command: tuple[str, str], tmp_path: Path) -> None:
    """A slot that was saved, and restored in another server, goes on with drafts."""
    server, drafts = command
    server = f"{server} -c 512 -np 2 --slot-save-path X"
    with running(server) as plain:
        wanted = complete(plain, [*PROMPTS[0], *PROMPTS[1]])
    with running(f"{server} {drafts}", tmp_path) as first:
        complete(first, PROMPTS[0], id_slot=1, n_predict=1)
        assert first.post("/slots/1?action=save", json={"filename": "text"}).status_code == 200
    with running(f"{server} {drafts}", tmp_path) as second:
        assert second.post("/slots/0?action=restore", json={"filename": "text"}).status_code == 200
        got = complete(second, [*PROMPTS[0], *PROMPTS[1]], id_slot=0)
    assert got["content"] == wanted["content"] and got["timings"]["draft_n"] > 25
    assert got["tokens_cached"] > 0 and got["timings"]["prompt_n"] < len(PROMPTS[0]) + len(PROMPTS[1])


def test_a_cancelled_request(command: tuple[str, str]) -> None:
    """Guesses that are evaluated then leave nothing behind the tokens that the slot keeps; the next text is right."""
    server = start_server(f"{command[0]} -c 512 -np 2 {command[1]}")
    engine, front = server.engine, server.front
    decode, cut = engine.context.decode, list[Any]()

    def cancelling(batch: Any, *, copy: bool) -> Any:
        for slot in engine.slots:
            if slot.task is not None and slot.draft and len(slot.tokens) > 36 and not cut:
                engine.cancel(slot.task)
                cut.append(slot)
        return decode(batch, copy=copy)

    engine.context.decode = cancelling  # type: ignore[method-assign]
    params = read_generation({"n_predict": 40, "temperature": 0, "ignore_eos": True}, front.settings, front.vocab, 2)
    events = list[Any]()
    try:
        for keep in (lambda event: None, events.append):
            engine.submit(CompletionTask(PROMPTS[0], keep, params=params, sampler=front.sampler(params)))
            assert wait_for(lambda: engine.n_idle == 2 and not engine.n_deferred)
            if keep is not events.append:
                (slot,) = cut
                assert engine.context.kv.seq_pos_max(slot.id) == len(slot.tokens) - 1
        after = slot.tokens[: len(PROMPTS[0]) + 39]
    finally:
        engine.stop(10)
    with running(f"{command[0]} -c 512 -np 2") as plain:
        wanted = complete(plain, PROMPTS[0], return_tokens=True)["tokens"]
    assert list(after)[len(PROMPTS[0]) :] == wanted[:39] and events
