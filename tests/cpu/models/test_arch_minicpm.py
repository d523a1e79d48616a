"""MiniCPM and MiniCPM 3: random models against their definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import IkpyError
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import RMS, TOKENS
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

N_LAYER, D, HEADS, KV, HEAD, F, BASE = 3, 96, 6, 2, 32, 160, 1e4
NOPE, ROT, VALUE, RANK, Q_RANK = 32, 32, 64, 64, 48
SHORT_CONTEXT = 64
BOUND = 1e-4
LONG = np.random.default_rng(8).integers(4, N_VOCAB, 150)
Made = tuple[RandomModel, np.ndarray]


def add_factors(m: RandomModel, n: int) -> None:
    """Of LongRoPE, for contexts up to SHORT_CONTEXT and beyond."""
    m.keys["rope.scaling.original_context_length"] = SHORT_CONTEXT
    for kind, least in (("short", 1.0), ("long", 2.0)):
        m.weights[f"rope_factors_{kind}"] = m.random.uniform(least, 4 * least, n // 2).astype(np.float32)


def new_minicpm(seed: int, *, tied: bool = True, factors: bool = False, **keys: Any) -> RandomModel:
    """factors: of LongRoPE."""
    m = RandomModel("minicpm", seed, **{**checks.shape(N_LAYER, D, HEADS, KV, HEAD, F), **RMS, **keys})
    checks.frame(m, D, tied=tied)
    if factors:
        add_factors(m, HEAD)
    for il in range(N_LAYER):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        m.ffn(p, D, F)
    return m


def new_minicpm3(seed: int, *, factors: bool = True) -> RandomModel:
    keys = {
        **checks.shape(N_LAYER, D, HEADS, HEADS, NOPE + ROT, F),
        **RMS,
        "attention.value_length": VALUE,
        "rope.dimension_count": ROT,
        "attention.q_lora_rank": Q_RANK,
        "attention.kv_lora_rank": RANK,
    }
    m = RandomModel("minicpm3", seed, **keys)
    checks.frame(m, D, tied=True)
    if factors:
        add_factors(m, ROT)
    for il in range(N_LAYER):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.matrix(f"{p}.attn_q_a", Q_RANK, D)
        m.norm(f"{p}.attn_q_a_norm", Q_RANK)
        m.matrix(f"{p}.attn_q_b", HEADS * (NOPE + ROT), Q_RANK)
        m.matrix(f"{p}.attn_kv_a_mqa", RANK + ROT, D)
        m.norm(f"{p}.attn_kv_a_norm", RANK)
        m.matrix(f"{p}.attn_kv_b", HEADS * (NOPE + VALUE), RANK)
        m.matrix(f"{p}.attn_output", D, HEADS * VALUE)
        m.ffn(p, D, F)
    return m


def latent_heads_of(e: Evaluation, il: int, h: np.ndarray) -> list[np.ndarray]:
    """q and k [T, H, NOPE + ROT] with the rotated part last, and v [T, H, VALUE]."""
    w = checks.layer_weights(e, il)
    q = ref.rms_norm(h @ w["attn_q_a"].T, w["attn_q_a_norm"], e.eps) @ w["attn_q_b"].T
    latent, shared = np.split(h @ w["attn_kv_a_mqa"].T, [RANK], axis=1)
    latent = ref.rms_norm(latent, w["attn_kv_a_norm"], e.eps)
    both = (latent @ w["attn_kv_b"].T).reshape(len(h), HEADS, NOPE + VALUE)
    k = np.concatenate([both[..., :NOPE], np.repeat(shared[:, None], HEADS, 1)], axis=2)
    return [q.reshape(len(h), HEADS, -1), k, both[..., NOPE:]]


def evaluated(
    m: RandomModel,
    tokens: np.ndarray = TOKENS,
    *,
    factors: str = "",
    magnitude: float = 1.0,
    scales: tuple[float, float, float] = (12.0, 1.4 / math.sqrt(N_LAYER), 256 / D),
) -> np.ndarray:
    """Logits [T, V] in float64; factors: short or long; scales: of embeddings, branches and logits."""
    e = Evaluation(m)
    is_latent = m.arch == "minicpm3"
    rotated = ROT if is_latent else HEAD
    pos = np.arange(len(tokens), dtype=np.float64)
    angles = ref.plain_angles(rotated, BASE, pos, e.w[f"rope_factors_{factors}"] if factors else 1.0)

    def turned(x: np.ndarray) -> np.ndarray:
        y = x.copy()
        y[..., -rotated:] = ref.rotate(x[..., -rotated:], angles, neox=is_latent, magnitude=magnitude)
        return y

    x = e.w["token_embd"][tokens] * scales[0]
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        q, k, v = latent_heads_of(e, il, h) if is_latent else e.qkv(il, h)
        attended = ref.attend(turned(q), turned(k), v, 1 / math.sqrt(q.shape[2]))
        x = x + scales[1] * (attended @ w["attn_output"].T)
        x = x + scales[1] * e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    y = ref.rms_norm(x, e.w["output_norm"], e.eps) * scales[2]
    return y @ e.w.get("output", e.w["token_embd"]).T


def minicpm() -> Made:
    """Scales in keys, as files of today have them."""
    keys = {"embedding_scale": 10.0, "residual_scale": 0.3, "logit_scale": 1.7}
    m = new_minicpm(141, **keys)
    return m, evaluated(m, scales=(10.0, 0.3, 1 / 1.7))


def minicpm_first_files() -> Made:
    """No scales in the file; an output matrix of its own."""
    m = new_minicpm(142, tied=False)
    return m, evaluated(m)


def minicpm_long_rope() -> Made:
    """As MiniCPM 4, in a context beyond the original one, with a magnitude."""
    keys = {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.19, "logit_scale": D / 256}
    m = new_minicpm(143, factors=True, **keys)
    return m, evaluated(m, factors="long", magnitude=1.19)


def minicpm3() -> Made:
    m = new_minicpm3(144)
    return m, evaluated(m, factors="long")


def minicpm3_plain() -> Made:
    """Without factors."""
    m = new_minicpm3(145, factors=False)
    return m, evaluated(m)


MODELS = [minicpm, minicpm_first_files, minicpm_long_rope, minicpm3, minicpm3_plain]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Callable[[], Made], tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path, BOUND)
    checks.check_quantized_cache(path, truth, 0.05)
    if model.arch == "minicpm":
        checks.check_shift(path)


@pytest.mark.parametrize("make", [minicpm_long_rope, minicpm3], ids=lambda f: f.__name__)
def test_short_contexts(make: Callable[[], Made], tmp_path: Path) -> None:
    model, _ = make()
    magnitude = model.keys.get("rope.scaling.attn_factor", 1.0)
    context = Context(
        Model.load(model.write(tmp_path / "model.gguf")),
        ContextParams(n_ctx=256, n_seq_max=256 // SHORT_CONTEXT, n_threads=1, type_k="f32", type_v="f32"),
    )
    logits = context.decode(Batch.single(TOKENS, logits="all"))
    truth = evaluated(model, factors="short", magnitude=magnitude)
    assert np.abs(logits - truth).max() < BOUND * np.abs(truth).max()


@pytest.mark.parametrize("n_ubatch", [512, 50])
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_modes_of_latent_attention(mla: int, n_ubatch: int, tmp_path: Path) -> None:
    """Also of prompts whose cells are expanded."""
    model = new_minicpm3(146)
    truth = evaluated(model, LONG, factors="long")
    settings = ContextParams(n_ctx=256, n_threads=1, n_ubatch=n_ubatch, mla=mla, type_k="f32", type_v="f32")
    context = Context(Model.load(model.write(tmp_path / "model.gguf"), ModelParams(mla=mla)), settings)
    error = np.abs(context.decode(Batch.single(LONG, logits="all")) - truth).max(axis=1) / np.abs(truth).max()
    assert error.max() < BOUND, f"token {error.argmax()} off by {error.max():.1e}"


def test_what_cannot_be(tmp_path: Path) -> None:
    for make, key, value, message in (
        (new_minicpm3, "expert_count", 8, "no expert layers are used"),
        (new_minicpm3, "attention.kv_lora_rank", 32, "tensor 'blk.0.attn_kv_a_mqa.weight' has wrong shape"),
        (new_minicpm, "logit_scale", 0.0, "minicpm.logit_scale is 0"),
        (new_minicpm, "rope.scaling.type", "dynamic", "unknown RoPE scaling type 'dynamic'"),
    ):
        model = make(147)  # type: ignore[operator]
        model.keys[key] = value
        with pytest.raises(IkpyError, match=message):
            Model.load(model.write(tmp_path / "model.gguf"))
