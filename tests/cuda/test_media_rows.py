"""Rows of pictures in place of tokens on devices, against the definition of the models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.media import MediaStore
from ikpy.engine.memory import memory_report
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.placement import PlacementParams
from tests.cpu.media import media_models as media
from tests.cpu.models.definition_checks import hold
from tests.cpu.models.reference_models import N_VOCAB

TOLERANCE = 3e-3  # other formats of activations and other orders of sums
PLACES = {
    "whole": PlacementParams(split_mode="none"),
    "embeddings too": PlacementParams(split_mode="none", rules=(("token_embd", "CUDA0"),)),
    "first layer on the CPU": PlacementParams(n_gpu_layers=2, split_mode="none"),
    "two devices": PlacementParams(tensor_split=(1.0, 1.0)),
    "heads and networks divided": PlacementParams(split_mode="graph", tensor_split=(1.0, 1.0)),
    "caches on the CPU": PlacementParams(kv_offload=False),
}


def new_context(
    path: Path, store: MediaStore, placement: PlacementParams, *, header_only: bool = False, **params: object
) -> Context:
    settings = {"n_ctx": 256, "n_ubatch": 32, "n_threads": 2, "n_seq_max": 2, **params}
    model = Model.load(path, ModelParams(placement=placement, header_only=header_only))
    return Context(model, ContextParams(media=store, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", media.MODELS)
def test_two_texts_with_pictures(name: str, where: str, tmp_path: Path, cuda_devices: int) -> None:
    """Both in batches of more than one micro-batch, of sizes that are padded, then token by token."""
    placement = PLACES[where]
    if cuda_devices < 2 and placement.tensor_split:
        pytest.skip("needs two GPUs")
    model = media.MODELS[name]()
    path, store = model.write(tmp_path / "model.gguf"), MediaStore(N_VOCAB, 1 << 20)
    text = media.text_for(model)
    other = [*media.words(9, 3), text[6], *media.words(8, 8)]
    context = new_context(path, store, placement)
    ids, other_ids = media.ids_of(store, text), media.ids_of(store, other)
    n, n_other = len(ids) - 5, len(other_ids) - 5
    both = Batch()
    both.add(ids[:n], 0, 0, "all")
    both.add(other_ids[:n_other], 0, 1, "all")
    found = np.split(context.decode(both), [n])
    for i in range(5):
        step = Batch()
        step.add(ids[n + i : n + i + 1], n + i, 0, "all", store.turn(ids[: n + i]))
        step.add(other_ids[n_other + i :][:1], n_other + i, 1, "all", store.turn(other_ids[: n_other + i]))
        rows = context.decode(step)
        found = [np.concatenate([found[seq], rows[seq : seq + 1]]) for seq in (0, 1)]
    for seq, (logits, items) in enumerate(zip(found, (text, other), strict=True)):
        hold(f"sequence {seq}", logits, media.evaluate(model, items), TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3vl", "gemma3"])
@pytest.mark.parametrize("where", ["whole", "two devices"])
def test_memory_is_measured_as_it_is_taken(name: str, where: str, tmp_path: Path, cuda_devices: int) -> None:
    """With pictures more than without."""
    if cuda_devices < 2 and PLACES[where].tensor_split:
        pytest.skip("needs two GPUs")
    path, store = media.MODELS[name]().write(tmp_path / "model.gguf"), MediaStore(N_VOCAB, 1 << 20)
    planned, taken = (new_context(path, store, PLACES[where], header_only=header_only) for header_only in (True, False))
    assert memory_report(planned) == memory_report(taken)
