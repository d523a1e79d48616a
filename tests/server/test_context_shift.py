"""Answers longer than a slot's context: where they end, and what the log says."""

from __future__ import annotations

import io
import json

import pytest

from ikpy.cli.parser import parse
from ikpy.cli.session import load
from ikpy.engine.context import Context
from ikpy.engine.params import ContextParams
from ikpy.server.log import ServerLog
from ikpy.server.scheduler import Engine
from ikpy.server.settings import ServerSettings
from tests.server.harness import MODELS, greedy_answer, loaded
from tests.shared import DATA

N_CTX, N_TRAIN, N_PROMPT = 64, 300, 20


def run(n_slot: int, n_prompt: int = N_PROMPT, **more: object) -> tuple[object, list[dict[str, object]]]:
    """What a slot of ``n_slot`` tokens answers when no token ends the text, and the lines of the log."""
    path = str(DATA / "zoo" / "llama-ropefreqs.gguf")
    line = ["-m", path, "--override-kv", f"llama.context_length=int:{N_TRAIN}", "--log-disable", "-t", "1"]
    model = load(parse(line, "server")).model
    assert model.hparams.n_ctx_train == N_TRAIN
    out = io.StringIO()
    context = Context(model, ContextParams(n_ctx=n_slot, n_threads=1, flash_attn=False))
    engine = Engine(context, loaded(MODELS["MODEL"]).vocab, ServerSettings(), ServerLog("json", out))
    engine.start()
    answer = greedy_answer(engine, list(range(5, 5 + n_prompt)), model.hparams.n_vocab, **more)
    engine.stop(10)
    return answer, [json.loads(text) for text in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("limit", "n_slot", "n_decoded"),
    [
        (-1, N_CTX, N_TRAIN - N_PROMPT),
        (-1, 352, 352 - N_PROMPT),  # more than the training context: the slot's own is what the user asked for
        (N_TRAIN + 50, N_CTX, N_TRAIN + 50),
    ],
)
def test_an_answer_without_a_limit_ends_with_the_training_context(limit: int, n_slot: int, n_decoded: int) -> None:
    answer, _ = run(n_slot, limit=limit, t_max_predict_ms=60_000)
    assert (answer.n_decoded, answer.stopped_limit, answer.truncated) == (n_decoded, True, True)


def test_shifts_are_logged() -> None:
    _, lines = run(N_CTX, limit=N_CTX, n_keep=3, n_discard=10)
    found = [line for line in lines if line["msg"] == "slot context shift"]
    assert len(found) == 2, "63 tokens, then 10 fewer after each shift"
    shown = {name: found[0][name] for name in ("id_slot", "n_keep", "n_left", "n_discard", "n_ctx")}
    assert shown == {"id_slot": 0, "n_keep": 4, "n_left": N_CTX - 1 - 4, "n_discard": 10, "n_ctx": N_CTX}
