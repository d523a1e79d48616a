"""Encoders and decoders (T5) on devices: logits of every placement are those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.session import put_state, take_state
from ikpy.graph.placement import PlacementParams
from tests.cpu.models.reference_models import N_VOCAB
from tests.cpu.models.t5_models import TOKENS, new_t5

TOLERANCE = 3e-3  # other formats of activations and other orders of sums than the CPU's
ON_CPU = PlacementParams(n_gpu_layers=0)
PLACES: dict[str, dict[str, Any]] = {
    "whole": {"split_mode": "none"},
    "first layers on the CPU": {"n_gpu_layers": 3, "split_mode": "none"},
    "two devices": {"tensor_split": (1.0, 1.0)},
    "divided": {"split_mode": "graph", "tensor_split": (1.0, 1.0)},
    "caches on the CPU": {"kv_offload": False, "split_mode": "none"},
    "decoder on the CPU": {"rules": ((r"^dec\.", "CPU"),)},
}
KINDS: dict[str, dict[str, Any]] = {
    "t5": {"n_decoder": 3, "gated": False, "tied": True},
    "umt5": {"n_decoder": 4, "own_biases": True},
}


def logits_of(path: Path, placement: PlacementParams) -> np.ndarray:
    """Of two texts in one batch, their answers, single tokens, and a restored state."""
    model = Model.load(path, ModelParams(placement=placement))
    context = Context(model, ContextParams(n_ctx=256, n_ubatch=128, n_threads=1, n_seq_max=3))
    n, m, answer = len(TOKENS), 20, [3, *TOKENS[:9].tolist()]
    batch = Batch()
    batch.add(TOKENS + N_VOCAB, 0, 0, "none")
    batch.add(TOKENS[:m] + N_VOCAB, 0, 1, "none")
    context.decode(batch)
    batch = Batch()
    batch.add(answer, n, 0, "all", n)
    batch.add(answer[:6], m, 1, "all", m)
    found = [context.decode(batch)]
    for i, token in enumerate(answer[6:], 6):
        found.append(context.decode(Batch.one(token, m + i, 1, m)))
    put_state(context, 2, take_state(context, 0, [0] * (n + len(answer))))
    found.append(context.decode(Batch.one(5, n + len(answer), 2, n)))
    return np.concatenate(found)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_cpu(kind: str, where: str, tmp_path: Path, cuda_devices: int) -> None:
    placement = PlacementParams(**PLACES[where])
    if cuda_devices < 2 and placement.tensor_split:
        pytest.skip("needs two GPUs")
    keys = {"decoder_block_count": KINDS[kind]["n_decoder"], "decoder_start_token_id": 3}
    path = new_t5("t5", 81, **KINDS[kind], **keys).write(tmp_path / "model.gguf")
    ours, truth = logits_of(path, placement), logits_of(path, ON_CPU)
    error = np.abs(ours - truth).max(axis=1) / np.abs(truth).max()
    assert error.max() <= TOLERANCE, f"row {error.argmax()} is off by {error.max():.1e} relative"
