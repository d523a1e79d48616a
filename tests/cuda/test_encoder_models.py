"""Encoders with windows to both sides on devices: states of every placement are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.placement import PlacementParams
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.t5_models import t5encoder, umt5encoder
from tests.cpu.models.test_arch_encoders import jina_bert_v3, modern_bert, modern_bert_silu, nomic_bert_moe
from tests.cpu.models.test_arch_gemma_embedding import TOKENS, gemma_embedding
from tests.cpu.models.test_arch_jina_bert_v2 import jina, jina_code, jina_fused, neo
from tests.cpu.models.test_arch_llama_embed import eurobert, llama_embed

TOLERANCE = 3e-3  # other formats of activations and other orders of sums than the CPU's
ON_CPU = PlacementParams(n_gpu_layers=0)
PLACES: dict[str, dict[str, Any]] = {
    "whole": {"split_mode": "none"},
    "first layers on the CPU": {"n_gpu_layers": 3, "split_mode": "none"},
    "two devices": {"tensor_split": (1.0, 1.0)},
    "heads and networks divided": {"split_mode": "graph", "tensor_split": (1.0, 1.0)},
    "networks on the CPU": {"rules": (("ffn", "CPU"),)},
    "experts on the CPU": {"rules": (("exps", "CPU"),)},
}
MODELS: list[Callable[[], tuple[RandomModel, np.ndarray]]] = [
    gemma_embedding,
    llama_embed,
    eurobert,
    modern_bert,
    modern_bert_silu,
    nomic_bert_moe,
    jina_bert_v3,
    jina,
    jina_code,
    jina_fused,
    neo,
    t5encoder,
    umt5encoder,
]


def states_of(path: Path, placement: PlacementParams) -> np.ndarray:
    """States of two texts in one batch."""
    model = Model.load(path, ModelParams(placement=placement))
    context = Context(model, ContextParams(n_ctx=256, n_ubatch=128, n_threads=1, n_seq_max=2))
    n, m = len(TOKENS), 20
    tokens = np.concatenate([TOKENS, TOKENS[:m]])
    members = [(0,)] * n + [(1,)] * m
    context.decode(Batch(tokens, np.concatenate([np.arange(n), np.arange(m)]), members, np.ones(n + m, bool)))
    assert context.embeddings is not None
    return context.embeddings


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_states_are_those_of_the_cpu(make: Callable, where: str, tmp_path: Path, cuda_devices: int) -> None:
    placement = PlacementParams(**PLACES[where])
    if cuda_devices < 2 and placement.tensor_split:
        pytest.skip("needs two GPUs")
    path = make()[0].write(tmp_path / "model.gguf")
    ours, truth = states_of(path, placement), states_of(path, ON_CPU)
    error = np.abs(ours - truth).max(axis=1) / np.abs(truth).max()
    assert error.max() <= TOLERANCE, f"token {error.argmax()} is off by {error.max():.1e} relative"
