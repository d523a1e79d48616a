"""EXAONE 4 and K-EXAONE: random models against their definition and llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

WINDOW = 9


def attended(e: Evaluation, w: ref.Weights, il: int, h: np.ndarray, *, rotated: bool, window: int) -> np.ndarray:
    """Attention with normed heads, rotated with factors of the frequencies or not at all."""
    q, k, v = e.qkv(il, h)
    q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
    if rotated:
        angles = ref.plain_angles(e.head, 10000.0, POS, e.w["rope_freqs"])
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
    visible = (lambda i, j: i - j < window) if window else None
    return e.output(il, ref.attend(q, k, v, 1 / math.sqrt(e.head), visible=visible))


def exaone4(n: int = 2, window: int = 0) -> tuple[RandomModel, np.ndarray]:
    """Without a window (1.2B), every layer is rotated."""
    d, heads, kv, head, f = 96, 3, 1, 32, 76
    m = RandomModel("exaone4", 41, **checks.shape(n, d, heads, kv, head, f), **RMS)
    if window:
        m.keys["attention.sliding_window"] = window
        m.keys["attention.sliding_window_pattern"] = [il % 4 < 3 for il in range(n)]
    checks.frame(m, d, tied=True)
    m.norm("rope_freqs", head // 2)
    for il in range(n):
        p = f"blk.{il}"
        for name, size in (
            ("attn_q_norm", head),
            ("attn_k_norm", head),
            ("post_attention_norm", d),
            ("post_ffw_norm", d),
        ):
            m.norm(f"{p}.{name}", size)
        m.attention(p, d, heads, kv, head)
        m.ffn(p, d, f)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(n):
        w = checks.layer_weights(e, il)
        local = il % 4 < 3
        a = attended(e, w, il, x, rotated=not window or local, window=window if local else 0)
        x = x + ref.rms_norm(a, w["post_attention_norm"], e.eps)
        x = x + ref.rms_norm(e.ffn(il, x), w["post_ffw_norm"], e.eps)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T


def exaone4_windows() -> tuple[RandomModel, np.ndarray]:
    """The 32B model: 64 layers, by which other engines know it; full layers have no positions."""
    return exaone4(64, WINDOW)


def exaone_moe() -> tuple[RandomModel, np.ndarray]:
    """A dense layer, then experts by sigmoid with a selection bias and a shared expert."""
    n, d, heads, kv, head, f, n_expert, used, scale = 4, 64, 3, 1, 32, 32, 8, 3, 2.5
    keys = {
        "expert_count": n_expert,
        "expert_used_count": used,
        "expert_feed_forward_length": f,
        "expert_shared_count": 1,
        "expert_weights_scale": scale,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [il % 4 < 3 for il in range(n)],
    }
    m = RandomModel("exaone-moe", 42, **checks.shape(n, d, heads, kv, head, 76), **RMS, **keys)
    checks.frame(m, d, tied=False)
    m.norm("rope_freqs", head // 2)
    for il in range(n):
        p = f"blk.{il}"
        for name, size in (("attn_q_norm", head), ("attn_k_norm", head), ("attn_norm", d), ("ffn_norm", d)):
            m.norm(f"{p}.{name}", size)
        m.attention(p, d, heads, kv, head)
        if il == 0:
            m.ffn(p, d, 76)
        else:
            checks.experts(m, p, d, f, n_expert)
            m.vector(f"{p}.exp_probs_b.bias", n_expert)
            m.ffn(p, d, f, "_shexp")
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(n):
        w = checks.layer_weights(e, il)
        local = il % 4 < 3
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        x = x + attended(e, w, il, h, rotated=local, window=WINDOW if local else 0)
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        x = x + (checks.sigmoid_routed(w, h, used, scale) + e.ffn(il, h, suffix="_shexp") if il else e.ffn(il, h))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


@pytest.mark.parametrize("make", [exaone4, exaone4_windows, exaone_moe], ids=lambda f: f.__name__)
def test_definition_and_peer(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.06)
    checks.check_peer(path, make.__name__, 0.02)


def test_windows_without_a_pattern(tmp_path: Path) -> None:
    """All but every fourth layer have windows."""
    model, truth = exaone_moe()
    del model.keys["attention.sliding_window_pattern"]
    checks.check_definition(model, truth, tmp_path)
