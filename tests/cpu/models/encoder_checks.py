"""Checks of encoders of texts against states that a definition gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ikpy
from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.test_encoders import assert_states, unit


def check_states(model: RandomModel, tokens: np.ndarray, wanted: np.ndarray, folder: Path, *, flash: bool) -> None:
    """One text, some of its rows, and two texts in one batch that do not see each other."""
    params = ContextParams(n_ctx=256, n_threads=1, flash_attn=flash, type_k="f32", type_v="f32", n_seq_max=2)
    context = Context(Model.load(model.write(folder / "model.gguf")), params)
    n = len(tokens)
    context.decode(Batch.single(tokens, logits="all"))
    assert_states(context.embeddings, wanted, "one text")
    context.kv.clear()
    context.decode(Batch(tokens, np.arange(n), [(0,)] * n, np.arange(n) % 5 == 2))
    assert_states(context.embeddings, wanted[2::5], "some rows")
    context.kv.clear()
    pos = np.concatenate([np.arange(n), np.arange(n)])
    context.decode(Batch(np.tile(tokens, 2), pos, [(0,)] * n + [(1,)] * n, np.ones(2 * n, bool)))
    assert context.embeddings is not None
    assert_states(context.embeddings[:n], wanted, "first of two")
    assert_states(context.embeddings[n:], wanted, "second of two")


def check_embeddings(model: RandomModel, folder: Path, *, first: bool = False) -> None:
    """The mean of all states, or the first one, of the model, and of what is left of it in Q8_0."""
    path = model.write(folder / "model.gguf")
    llm = ikpy.LLM(path, n_threads=1, type_k="f32", type_v="f32")
    states = llm.token_embeddings("the old man")
    wanted = states[0] if first else states.mean(axis=0)
    np.testing.assert_allclose(llm.embed("the old man")[0], unit(wanted), atol=1e-6)
    assert quantize([str(path), str(folder / "small.gguf"), "Q8_0"]) == 0
    small = ikpy.LLM(folder / "small.gguf", n_threads=1)
    assert small.embed("the old man")[0] @ llm.embed("the old man")[0] > 0.995
