"""Trinity (afmoe): random models against their definition and llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

WINDOW = 9


def afmoe(window: int = WINDOW, heads: int = 3, kv: int = 1) -> tuple[RandomModel, np.ndarray]:
    """A gate per element of the attention, norms before and behind both branches; window layers alone are rotated."""
    n, d, head, f, n_expert, used, scale = 4, 96, 32, 32, 8, 3, 2.8
    keys = {
        "expert_count": n_expert,
        "expert_used_count": used,
        "expert_feed_forward_length": f,
        "expert_shared_count": 1,
        "expert_weights_scale": scale,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "attention.sliding_window": window,
    }
    m = RandomModel("afmoe", 61, **checks.shape(n, d, heads, kv, head, 76), **RMS, **keys)
    checks.frame(m, d, tied=False)
    m.weights["token_embd"] /= 4  # the scale would drown what the first layers add
    for il in range(n):
        p = f"blk.{il}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            m.norm(f"{p}.{name}", d)
        m.norm(f"{p}.attn_q_norm", head)
        m.norm(f"{p}.attn_k_norm", head)
        m.attention(p, d, heads, kv, head)
        m.matrix(f"{p}.attn_gate", heads * head, d)
        if il == 0:
            m.ffn(p, d, 76)
        else:
            checks.experts(m, p, d, f, n_expert)
            m.vector(f"{p}.exp_probs_b.bias", n_expert)
            m.ffn(p, d, f, "_shexp")
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS] * math.sqrt(d)
    angles = ref.plain_angles(head, 10000.0, POS)
    for il in range(n):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        q, k, v = e.qkv(il, h)
        q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
        local = il % 4 < 3
        if local:
            q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        visible = (lambda i, j: i - j < window) if window and local else None
        a = ref.attend(q, k, v, 1 / math.sqrt(head), visible=visible) * ref.sigmoid(h @ w["attn_gate"].T)
        x = x + ref.rms_norm(e.output(il, a), w["post_attention_norm"], e.eps)
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        y = checks.sigmoid_routed(w, h, used, scale) + e.ffn(il, h, suffix="_shexp") if il else e.ffn(il, h)
        x = x + ref.rms_norm(y, w["post_ffw_norm"], e.eps)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def test_definition_and_peer(tmp_path: Path) -> None:
    model, truth = afmoe()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.05)
    checks.check_peer(path, "afmoe", 0.02)


def test_without_windows(tmp_path: Path) -> None:
    """Every fourth layer still has no positions."""
    checks.check_definition(*afmoe(0), tmp_path)
