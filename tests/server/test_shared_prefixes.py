"""Slots share the cells of a common beginning, and part when one of them shifts its context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.sequence_state import unshare_sequence
from ikpy.server.log import ServerLog
from ikpy.server.scheduler import Engine
from ikpy.server.settings import ServerSettings
from ikpy.server.tasks import Finished
from tests.cpu.models.test_zoo_holdouts import gpt_oss
from tests.server import harness
from tests.server.harness import MODELS, loaded
from tests.shared import DATA

COMMAND = "llama-server -m MODEL -t 1 -c 1536 -np 3"
STORY = "The old man looked at the sea, and the sea was grey. " * 6


def complete(client: Any, **body: Any) -> Any:
    response = client.post("/completion", json={"temperature": 0, "n_predict": 8, "cache_prompt": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_answers_of_one_prompt_evaluate_it_once() -> None:
    """n = 3: the beginning is evaluated by one slot and lies in the cache once."""
    server = harness.start_server(COMMAND)
    try:
        from starlette.testclient import TestClient

        client = TestClient(server.app)
        answers = complete(client, prompt=STORY, n=3)
        texts = {a["content"] for a in answers}
        assert len(texts) == 1
        n_prompt = answers[0]["tokens_evaluated"]
        evaluated = sorted(a["timings"]["prompt_n"] for a in answers)
        assert evaluated == [1, 1, n_prompt], f"{evaluated} of {n_prompt} tokens"
        used = server.engine.context.kv.used_cells
        assert used <= n_prompt + 3 * 8, f"{used} cells for a prompt of {n_prompt} tokens"
        tail = complete(client, prompt=STORY + " And then", id_slot=2)
        alone = complete(client, prompt=STORY + " And then", id_slot=1, cache_prompt=False)
        assert tail["content"] == alone["content"] and alone["timings"]["prompt_n"] == alone["tokens_evaluated"]
    finally:
        server.engine.stop(10)


def test_short_common_beginnings_are_not_shared() -> None:
    with harness.running(COMMAND) as client:
        answers = complete(client, prompt="The old man", n=3)
        assert [a["timings"]["prompt_n"] for a in answers] == [answers[0]["tokens_evaluated"]] * 3


@pytest.mark.parametrize("type_k", ["f32", "q8_0"])
def test_a_sequence_gets_cells_of_its_own(type_k: str) -> None:
    """Two sequences with a common beginning: one moves, the other stays as it is."""
    tokens = np.random.default_rng(1).integers(3, 1000, 40)
    params = ContextParams(n_ctx=256, n_threads=1, type_k=type_k, type_v="f32", n_seq_max=2)
    ctx = Context(Model.load(DATA / "zoo" / "llama-ropefreqs.gguf"), params)
    ctx.decode(Batch.single(tokens))
    ctx.kv.seq_cp(0, 1)
    assert unshare_sequence(ctx, 1) == 40 and ctx.kv.used_cells == 80 and unshare_sequence(ctx, 1) == 0
    ctx.kv.seq_rm(1, 3, 13)
    ctx.kv.seq_add(1, 13, -1, -10)
    moved = ctx.decode(Batch.single([9], 30, 1))
    stays = ctx.decode(Batch.single([9], 40, 0))
    alone = Context(ctx.model, params)
    alone.decode(Batch.single(tokens))
    wanted = alone.decode(Batch.single([9], 40))
    assert np.abs(stays - wanted).max() < 2e-3
    alone.kv.seq_rm(0, 40, -1)
    alone.kv.seq_rm(0, 3, 13)
    alone.kv.seq_add(0, 13, -1, -10)
    assert np.abs(moved - alone.decode(Batch.single([9], 30))).max() < 2e-3


def test_shifting_slots_do_not_disturb_those_they_shared_with() -> None:
    """One slot generates past its context while another keeps the common beginning."""
    vocab = loaded(MODELS["MODEL"]).vocab
    model = Model.load(DATA / "zoo" / "llama-ropefreqs.gguf")
    prompt = np.random.default_rng(5).integers(3, 1000, 60).tolist()

    def run(n_slots: int, requests: list[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Tokens of requests (slot, length), one after the other."""
        context = Context(
            model, ContextParams(n_ctx=256 * n_slots, n_threads=1, n_seq_max=n_slots, type_k="f32", type_v="f32")
        )
        engine = Engine(context, vocab, ServerSettings(n_slots=n_slots, slot_prompt_similarity=2.0), ServerLog())
        engine.start()
        found = []
        for slot, n in requests:
            found.append(
                harness.greedy_answer(
                    engine, prompt, model.hparams.n_vocab, vocab.eog, limit=n, n_keep=4, n_discard=10, id_slot=slot
                ).tokens
            )
        engine.stop(10)
        return found

    together = run(2, [(0, 20), (1, 300), (0, 20)])
    assert together[0] == run(1, [(0, 20)])[0]
    assert together[2] == together[0], "the first slot's cache is as it was"
    alone = run(1, [(0, 300)])[0]
    differs = next((i for i in range(300) if together[1][i] != alone[i]), 300)
    assert differs > 220, f"token {differs} differs: the context of the second slot shifted after about 195 tokens"


def test_text_that_a_window_has_left_is_not_shared(tmp_path: Path) -> None:
    """Layers with a window keep its last tokens only: text from the middle of another slot's must be evaluated."""
    context = Context(
        Model.load(gpt_oss()[0].write(tmp_path / "model.gguf")),
        ContextParams(n_ctx=512, n_ubatch=32, n_threads=1, n_seq_max=2, type_k="f32", type_v="f32", flash_attn=False),
    )
    vocab = loaded(MODELS["MODEL"]).vocab
    engine = Engine(context, vocab, ServerSettings(n_slots=2, slot_prompt_similarity=2.0), ServerLog())
    first, second = np.random.default_rng(5).integers(3, context.model.hparams.n_vocab, (2, 200)).tolist()

    def answer(prompt: list[int], slot: int, **more: Any) -> Finished:
        return harness.greedy_answer(engine, prompt, context.model.hparams.n_vocab, limit=12, id_slot=slot, **more)

    engine.start()
    try:
        answer(first, 0)
        assert all(cells.lost[0] > 100 for cells in context.kv.windows.values())
        shared = answer(first[:100] + second[:2], 1)
        alone = answer(first[:100] + second[:2], 1, cache_prompt=False)
        assert (shared.n_cached, shared.tokens) == (0, alone.tokens)
    finally:
        engine.stop(10)
