"""Classifier-free guidance: the formula, and the command line."""

from __future__ import annotations

import io

import numpy as np
import pytest

import ikpy
from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.guidance import Guidance
from tests.cpu.models.bigram_model import BigramContext, random_table


def test_logits_are_pushed_away_from_the_negative_text() -> None:
    """Token by token: both texts end in what was generated, only their beginnings differ."""
    model = Model.load(ikpy.default_model_path())
    params = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32")
    text, negative, scale = [5, 17, 400, 9], [88, 3, 120], 2.5
    sampler = Sampler(SamplingParams(temperature=0.0), model.hparams.n_vocab)
    sampler.guidance = Guidance(Context(model, params), negative, scale)
    sequence = GrowingSequence(Context(model, params))
    tokens = sequence.generate(sampler, sequence.feed(text), frozenset())
    found = [next(tokens) for _ in range(8)]
    plain = Context(model, params)

    def log_probabilities(ids: list[int]) -> np.ndarray:
        plain.kv.clear()
        x = plain.decode(Batch.single(ids))[-1].astype(np.float64)
        return x - x.max() - np.log(np.exp(x - x.max()).sum())

    for i, token in enumerate(found):
        base, away = log_probabilities(text + found[:i]), log_probabilities(negative + found[:i])
        guided = away + scale * (base - away)
        best = np.sort(guided)[-2:]
        assert token == guided.argmax() or best[1] - best[0] < 1e-3, f"token {i}"


def test_the_negative_text_survives_a_context_shift() -> None:
    table = random_table()
    context = BigramContext(table, n_ctx=32, n_batch=16)
    context.kv.can_shift = True
    guidance = Guidance(context, [1, 2, 3], 3.0)
    logits = random_table(9)[0]
    for token in range(100):
        guided = guidance.apply(logits)
        last = 3 if token == 0 else token - 1
        base, away = (x - np.log(np.exp(x.astype(np.float64)).sum()) for x in (logits, table[last]))
        np.testing.assert_allclose(guided, away + 3.0 * (base - away), atol=1e-4)
        guidance.accept(token)
    assert [context.kv.cells[0][p] for p in range(3)] == [1, 2, 3]


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        status = main(["cli", "-c", "256", "-t", "1", "-n", "12", "--temp", "0", "-p", "The old man", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    plain = run()[1]
    assert run("--cfg-scale", "1", "--cfg-negative-prompt", "The old man")[1] == plain
    guided = run("--cfg-scale", "4", "--cfg-negative-prompt", "The young girl")
    assert guided[0] == 0 and guided[1] != plain
    drafted = run("--cfg-scale", "4", "--cfg-negative-prompt", "The young girl", "--spec-type", "suffix")
    assert drafted[1] == guided[1]
    status, _, err = run("--cfg-scale", "2", "-cnv")
    assert status == 1 and "error: --cfg-scale works for the continuation of a prompt" in err
    assert main(["server", "--cfg-negative-prompt", "x"]) == 1
    assert "the server has no classifier-free guidance" in capsys.readouterr().err
