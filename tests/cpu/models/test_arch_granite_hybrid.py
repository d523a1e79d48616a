"""Granite 4.0 H, dense and with experts: random models against their definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_mamba2 import Sizes
from tests.cpu.models.reference_models import Evaluation, RandomModel

N_LAYER, D, HEADS, KV, HEAD, F = 5, 64, 4, 2, 32, 96
N_EXPERT, USED, F_SHARED = 8, 3, 64
SCORES, BRANCHES, EMBEDDING, LOGITS = 0.2, 0.6, 3.0, 2.0
MAMBA2 = Sizes(D, groups=1)
BOUND = 1e-4


def new_model(
    seed: int, *, attends: tuple[int, ...], experts: bool, rotated: bool | None, shared: bool = True
) -> RandomModel:
    """attends: the layers that do; rotated: None leaves the key out, as the first files did."""
    keys: dict[str, Any] = {
        **checks.shape(N_LAYER, D, HEADS, KV, HEAD, F),
        **RMS,
        **MAMBA2.keys,
        "attention.head_count_kv": [KV if il in attends else 0 for il in range(N_LAYER)],
        "attention.scale": SCORES,
        "residual_scale": BRANCHES,
        "embedding_scale": EMBEDDING,
        "logit_scale": LOGITS,
    }
    if rotated is not None:
        keys["rope.scaling.finetuned"] = rotated
    if experts:
        keys |= {"expert_count": N_EXPERT, "expert_used_count": USED}
        keys |= {"expert_shared_feed_forward_length": F_SHARED} if shared else {}
    m = RandomModel("granitehybrid", seed, **keys)
    checks.frame(m, D, tied=True)
    for il in range(N_LAYER):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        if il in attends:
            m.attention(p, D, HEADS, KV, HEAD)
        else:
            MAMBA2.add(m, p)
        if experts:
            checks.experts(m, p, D, F, N_EXPERT)
            if shared:
                m.ffn(p, D, F_SHARED, "_shexp")
        else:
            m.ffn(p, D, F)
    return m


def mixed(e: Evaluation, il: int, w: ref.Weights, h: np.ndarray, *, rotated: bool) -> np.ndarray:
    """First branch of a layer for a normed input h [T, D]."""
    if "ssm_in" in w:
        return MAMBA2.branch(w, h, e.eps)
    q, k, v = e.qkv(il, h)
    if rotated:
        angles = ref.plain_angles(HEAD, 10000.0, POS)
        q, k = (ref.rotate(x, angles, neox=False) for x in (q, k))
    return e.output(il, ref.attend(q, k, v, SCORES))


def network(e: Evaluation, il: int, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Second branch of a layer for a normed input h [T, D]."""
    if "ffn_gate_inp" not in w:
        return e.ffn(il, h)
    logits = h @ w["ffn_gate_inp"].T
    best = checks.chosen(np.ones_like(logits), USED, logits)
    weights = np.where(best > 0, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    out = checks.routed(w, h, weights / weights.sum(-1, keepdims=True), USED)
    return out + e.ffn(il, h, suffix="_shexp") if "ffn_up_shexp" in w else out


def evaluated(m: RandomModel, *, rotated: bool) -> np.ndarray:
    """Logits [T, V] of TOKENS in float64."""
    e = Evaluation(m)
    x = EMBEDDING * e.w["token_embd"][TOKENS]
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        x = x + BRANCHES * mixed(e, il, w, ref.rms_norm(x, w["attn_norm"], e.eps), rotated=rotated)
        x = x + BRANCHES * network(e, il, w, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T / LOGITS


def granite_hybrid() -> tuple[RandomModel, np.ndarray]:
    """Dense, without positions, as Granite 4.0 H Micro; the last layer attends."""
    m = new_model(95, attends=(2, 4), experts=False, rotated=False)
    return m, evaluated(m, rotated=False)


def granite_hybrid_moe() -> tuple[RandomModel, np.ndarray]:
    """Routed and shared experts, as Granite 4.0 H Tiny; the last layer is recurrent."""
    m = new_model(96, attends=(1, 3), experts=True, rotated=False)
    return m, evaluated(m, rotated=False)


def granite_hybrid_rotated() -> tuple[RandomModel, np.ndarray]:
    """With positions, which files without the key have, and without a shared expert."""
    m = new_model(97, attends=(0, 2), experts=True, rotated=None, shared=False)
    return m, evaluated(m, rotated=True)


MODELS = [granite_hybrid, granite_hybrid_moe, granite_hybrid_rotated]
Make = Callable[[], tuple[RandomModel, np.ndarray]]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Make, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path, BOUND)
    checks.check_quantized_cache(path, truth, 0.05)


@pytest.mark.parametrize("score_scale", [None, 0.0])
def test_scales_that_a_file_does_not_say(score_scale: float | None, tmp_path: Path) -> None:
    """As llama.cpp has it: no factors, and scores by the size of the heads."""
    model = new_model(98, attends=(1,), experts=False, rotated=False)
    usual = {"logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0, "attention.scale": 1 / math.sqrt(HEAD)}
    logits = []
    for values in (usual, {} if score_scale is None else {"attention.scale": score_scale}):
        model.keys = {name: value for name, value in model.keys.items() if name not in usual} | values
        context = Context(Model.load(model.write(tmp_path / "model.gguf")), ContextParams(n_ctx=64, n_threads=1))
        logits.append(context.decode(Batch.single(TOKENS, logits="all")))
    np.testing.assert_array_equal(*logits)


def test_what_cannot_be(tmp_path: Path) -> None:
    for key, value, message in (
        ("ssm.inner_size", 0, "impossible recurrent layers: inner_size 0, 8 heads in 1 groups"),
        ("logit_scale", 0.0, "logit_scale is 0"),
        ("residual_scale", math.nan, "residual_scale is nan"),
        ("logit_scale", 1e-38, "logit_scale is 1e-38, no possible scale"),
        ("attention.scale", -1e38, r"attention.scale is -1e\+38, no possible scale"),
        ("attention.layer_norm_rms_epsilon", math.inf, "layer_norm_rms_epsilon is inf"),
        ("attention.layer_norm_rms_epsilon", 1e38, r"the epsilon of norms is 1e\+38, above 1"),
        ("attention.head_count_kv", [0, 0, 2, 2, 2], "tensor 'blk.3.attn_q.weight' not found"),
    ):
        model = granite_hybrid()[0]
        model.keys[key] = value
        with pytest.raises(IkpyError, match=message):
            Model.load(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("make", [granite_hybrid, granite_hybrid_moe], ids=lambda f: f.__name__)
def test_quantized(make: Make, tmp_path: Path) -> None:
    model, truth = make()
    path = model.write(tmp_path / "model.gguf")
    assert quantize([str(path), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    small = ("norm.weight", ".bias", "ssm_a", "ssm_d", "ssm_conv1d.weight", "ffn_gate_inp.weight")
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        for name, info in file.tensors.items():
            assert info.type_id == (0 if name.endswith(small) else 8), name
    context = Context(Model.load(tmp_path / "small.gguf"), ContextParams(n_ctx=64, n_threads=1))
    logits = context.decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - truth).max(axis=1)) < 0.1 * np.abs(truth).max()
