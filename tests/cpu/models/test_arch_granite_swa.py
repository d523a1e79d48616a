"""Granite with windows and sinks: random models against their definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.model import Model
from ikpy.errors import FileFormatError
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

D, HEADS, KV, HEAD, F, N_EXPERT, USED, F_SHARED = 96, 4, 2, 32, 52, 8, 3, 40
WINDOW = 9
WINDOWS, ROTATED = [False, True, True, False], [False, True, False, True]
SCALES = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 4.0}


def new_model(seed: int, *, experts: bool, shared: bool = False, scales: bool = True) -> RandomModel:
    """shared: an expert that all tokens read; scales: of embeddings, branches and scores."""
    n = len(WINDOWS)
    keys: dict[str, Any] = {
        **checks.shape(n, D, HEADS, KV, HEAD, F),
        **RMS,
        **(SCALES if scales else {"logit_scale": 4.0}),
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": WINDOWS,
        "attention.rope_pattern": ROTATED,
    }
    if experts:
        keys |= {"expert_count": N_EXPERT, "expert_used_count": USED}
    if shared:
        keys["expert_shared_feed_forward_length"] = F_SHARED
    m = RandomModel("granite_swa", seed, **keys)
    checks.frame(m, D, tied=True)
    for il in range(n):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        m.vector(f"{p}.attn_sinks", HEADS)
        if experts:
            checks.experts(m, p, D, F, N_EXPERT)
        else:
            m.ffn(p, D, F)
        if shared:
            m.matrix(f"{p}.ffn_up_shexp", 2 * F_SHARED, D)
            m.matrix(f"{p}.ffn_down_shexp", D, F_SHARED)
    return m


def network(e: Evaluation, w: ref.Weights, il: int, h: np.ndarray) -> np.ndarray:
    """Dense, or softmax over the chosen experts, beside the shared one."""
    if "ffn_gate_inp" not in w:
        return e.ffn(il, h)
    z = h @ w["ffn_gate_inp"].T
    weights = np.exp(z) * checks.chosen(np.ones_like(z), USED, z)
    out = checks.routed(w, h, weights / weights.sum(-1, keepdims=True), USED)
    if "ffn_up_shexp" in w:
        gate, up = np.split(h @ w["ffn_up_shexp"].T, 2, axis=1)
        out = out + (ref.silu(gate) * up) @ w["ffn_down_shexp"].T
    return out


def made(seed: int, *, rotated: list[bool] = ROTATED, **kinds: bool) -> tuple[RandomModel, np.ndarray]:
    m = new_model(seed, **kinds)
    e, one = Evaluation(m), m.keys.get
    x = one("embedding_scale", 1.0) * e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(HEAD, 10000.0, POS)
    branch = one("residual_scale", 1.0)
    for il, local in enumerate(WINDOWS):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        if rotated[il]:
            q, k = (ref.rotate(t, angles, neox=False) for t in (q, k))
        visible = (lambda i, j: i - j < WINDOW) if local else None
        scale = one("attention.scale", 1 / math.sqrt(HEAD))
        x = x + branch * e.output(il, ref.attend(q, k, v, scale, visible=visible, sinks=w["attn_sinks"]))
        x = x + branch * network(e, w, il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T / 4.0


def granite_swa() -> tuple[RandomModel, np.ndarray]:
    """Dense."""
    return made(161, experts=False)


def granite_swa_moe() -> tuple[RandomModel, np.ndarray]:
    """Experts in every layer beside a shared one."""
    return made(162, experts=True, shared=True)


def granite_swa_plain() -> tuple[RandomModel, np.ndarray]:
    """Experts alone; scales that a file may lack."""
    return made(163, experts=True, scales=False)


def granite_swa_rotated() -> tuple[RandomModel, np.ndarray]:
    """Without a pattern all layers know positions."""
    model, truth = made(164, experts=False, rotated=[True] * 4)
    del model.keys["attention.rope_pattern"]
    return model, truth


MODELS = [granite_swa, granite_swa_moe, granite_swa_plain, granite_swa_rotated]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Any, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.06)


@pytest.mark.parametrize("key", ["attention.sliding_window", "attention.sliding_window_pattern"])
def test_windows_must_be_there(key: str, tmp_path: Path) -> None:
    model = new_model(165, experts=False)
    del model.keys[key]
    with pytest.raises(FileFormatError, match=key):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_sinks_must_be_there(tmp_path: Path) -> None:
    model = new_model(166, experts=False)
    del model.weights["blk.1.attn_sinks"]
    with pytest.raises(FileFormatError, match="attn_sinks"):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_size_class() -> None:
    assert size_class({"general.architecture": "granite_swa", "granite_swa.block_count": 40}) == "3B"
