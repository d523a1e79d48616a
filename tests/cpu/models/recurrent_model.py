"""Tiny random models with recurrent layers, and what their texts must give."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from tests.cpu.models import (
    glm5_next_model,
    qwen4exp_model,
    test_arch_bailingmoe3,
    test_arch_falcon_h1,
    test_arch_granite_hybrid,
    test_arch_jamba,
    test_arch_kimi_k3,
    test_arch_kimi_linear,
    test_arch_lfm2,
    test_arch_mamba2,
    test_arch_nemotron_h,
    test_arch_plamo,
    test_arch_rwkv,
)
from tests.cpu.models.reference_models import N_VOCAB, RandomModel
from tests.cpu.models.test_arch_qwen3next import add_separate, new_model

BOUND = 2e-4  # of the largest logit: other batches sum a state in another order


def qwen35(seed: int) -> RandomModel:
    """Gated delta rule, dense."""
    model = new_model("qwen35", seed, experts=False)
    add_separate(model)
    return model


def kimi_linear(seed: int) -> RandomModel:
    """A decay per channel, latents and experts."""
    return test_arch_kimi_linear.new_model(seed, split=True)


def bailingmoe3(seed: int) -> RandomModel:
    """A decay that is bounded, gated latents, groups of experts."""
    return test_arch_bailingmoe3.new_model(seed, low_rank=True)


def kimi_k3(seed: int) -> RandomModel:
    """Layers that read residual streams of earlier ones; the last one starts a stream."""
    return test_arch_kimi_k3.new_model(seed, published=True, n_layer=7, attends=(2, 5), block=3)


def lfm2(seed: int) -> RandomModel:
    """Convolutions alone."""
    return test_arch_lfm2.new_model(seed, experts=False)


def nemotron_h(seed: int) -> RandomModel:
    """Mamba-2; layers that are networks alone."""
    return test_arch_nemotron_h.new_model(seed, "M-M*-M")


def granite_hybrid(seed: int) -> RandomModel:
    """Mamba-2 and a network in every layer."""
    return test_arch_granite_hybrid.new_model(seed, attends=(1, 3), experts=True, rotated=False)


def falcon_h1(seed: int) -> RandomModel:
    """Mamba-2 and attention in every layer."""
    return test_arch_falcon_h1.new_model(seed)


def mamba2(seed: int) -> RandomModel:
    """States alone: no layer has a cache."""
    return test_arch_mamba2.new_model(seed)


def jamba(seed: int) -> RandomModel:
    """Rates of every channel, experts, and layers that attend."""
    return test_arch_jamba.new_jamba(seed)


def mamba(seed: int) -> RandomModel:
    """Rates of every channel, states alone; odd sizes."""
    return test_arch_jamba.new_mamba(seed)


def plamo2(seed: int) -> RandomModel:
    """A rate per head, one B and C for all heads, and layers that attend."""
    return test_arch_plamo.new_plamo2(seed)


def glm5_next(seed: int) -> RandomModel:
    """Bounded decays, pools of cells that indexers choose, several residual streams."""
    return glm5_next_model.random_model(glm5_next_model.Sizes(), seed)


def qwen4exp(seed: int) -> RandomModel:
    """Hashed n-grams, a dilated convolution, pools of cells that indexers choose."""
    return qwen4exp_model.random_model(qwen4exp_model.Sizes(), seed)


def rwkv7(seed: int) -> RandomModel:
    """Matrix states, the token before in both networks, values of the first layer."""
    return test_arch_rwkv.new_rwkv7(seed)


def rwkv6qwen2(seed: int) -> RandomModel:
    """Matrix states whose keys are weighed by what is forgotten."""
    return test_arch_rwkv.new_rwkv6qwen2(seed)


MODELS = {
    "qwen35": qwen35,
    "kimi-linear": kimi_linear,
    "bailingmoe3": bailingmoe3,
    "kimi-k3": kimi_k3,
    "lfm2": lfm2,
    "nemotron_h": nemotron_h,
    "granitehybrid": granite_hybrid,
    "falcon-h1": falcon_h1,
    "mamba2": mamba2,
    "jamba": jamba,
    "mamba": mamba,
    "plamo2": plamo2,
    "glm5-next": glm5_next,
    "qwen4exp": qwen4exp,
    "rwkv7": rwkv7,
    "rwkv6qwen2": rwkv6qwen2,
}


def write_model(folder: Path, words: list[str] | None = None, seed: int = 61, arch: str = "qwen35") -> Path:
    """A file of one of MODELS with a vocabulary: of these words, or of numbered ones."""
    model = MODELS[arch](seed)
    model.words = words or []
    return model.write(folder / "recurrent.gguf")


def text(seed: int, n: int) -> list[int]:
    """Random tokens without special ones."""
    return np.random.default_rng(seed).integers(4, N_VOCAB, n).tolist()


def new_context(path: Path, n_seq: int = 4, **params: object) -> Context:
    """A context with F32 cells."""
    settings = {"n_ctx": 256, "n_threads": 2, "type_k": "f32", "type_v": "f32", **params}
    return Context(Model.load(path), ContextParams(n_seq_max=n_seq, **settings))  # type: ignore[arg-type]


def expected(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits of every token of a text that is evaluated alone, in one batch."""
    return new_context(path, 1).decode(Batch.single(tokens, logits="all"))


def hold(what: str, logits: np.ndarray, truth: np.ndarray) -> None:
    """Every token's logits are those of the text alone."""
    error = np.abs(logits - truth).max(axis=1) / np.abs(truth).max()
    worst = int(error.argmax())
    assert error[worst] < BOUND, f"{what}: token {worst} of {len(truth)} off by {error[worst]:.1e} relative"
