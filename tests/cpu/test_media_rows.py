"""Rows of pictures in place of tokens: models against their definition, whatever micro-batches cut them into."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.media import MediaStore
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from tests.cpu import media_models as media
from tests.cpu.definition_checks import hold
from tests.cpu.reference_models import N_VOCAB

BOUND = 2e-4


def new_context(path: Path, store: MediaStore, **params: object) -> Context:
    """A context with an F32 cache that reads pictures."""
    settings = {"n_ctx": 256, "n_threads": 2, "n_seq_max": 3, "type_k": "f32", "type_v": "f32", **params}
    return Context(Model.load(path), ContextParams(media=store, **settings))  # type: ignore[arg-type]


def decoded(context: Context, store: MediaStore, ids: list[int], cuts: list[int], seq: int = 0) -> np.ndarray:
    """Logits of all tokens of a text that is evaluated in parts that end at these indices."""
    found, start = [], 0
    for end in [*cuts, len(ids)]:
        turn = store.turn(ids[:start])
        found.append(context.decode(Batch.single(ids[start:end], start, seq, "all", turn)))
        start = end
    return np.concatenate(found)


@pytest.mark.parametrize("name", media.MODELS)
@pytest.mark.parametrize("flash", [False, True])
def test_logits_are_those_of_the_definition(name: str, flash: bool, tmp_path: Path) -> None:
    """At once, in micro-batches and batches that end inside of pictures, and token by token behind them."""
    model = media.MODELS[name]()
    path, text = model.write(tmp_path / "model.gguf"), media.text_for(model)
    truth = media.evaluate(model, text)
    n = len(truth)
    # Rows that see each other are not to be cut apart.
    inside = [6, 21, 22] if name == "gemma3" else [9, 17, 27]
    for n_ubatch, cuts in ((512, []), (16, []), (16, inside), (512, [n - 14, *range(n - 12, n)])):
        store = MediaStore(N_VOCAB, 1 << 20)
        ids = media.ids_of(store, text)
        context = new_context(path, store, n_ubatch=n_ubatch, flash_attn=flash)
        hold(f"micro-batches of {n_ubatch}, cut at {cuts}", decoded(context, store, ids, cuts), truth, BOUND)
