"""OLMo 2, OLMo 3 and OLMoE: random models against their definition and llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel


def normed_heads(e: Evaluation, w: ref.Weights, il: int, h: np.ndarray) -> list[np.ndarray]:
    """q, k, v of a layer; q and k normalised over all heads."""
    q, k, v = e.qkv(il, h)
    n = len(h)
    q, k = (
        ref.rms_norm(t.reshape(n, -1), w[f"attn_{name}_norm"], e.eps).reshape(t.shape)
        for name, t in (("q", q), ("k", k))
    )
    return [q, k, v]


def add_head_norms(m: RandomModel, prefix: str, heads: int, kv: int, head: int) -> None:
    """Norms of q and k over all heads."""
    m.norm(f"{prefix}.attn_q_norm", heads * head)
    m.norm(f"{prefix}.attn_k_norm", kv * head)


def olmo2(n_window: int = 0) -> tuple[RandomModel, np.ndarray]:
    """Norms behind the branches; with a window (OLMo 3) the fourth layer alone sees everything."""
    n, d, heads, kv, head, f = 4 if n_window else 2, 96, 3, 1, 32, 76
    m = RandomModel("olmo2", 21, **checks.shape(n, d, heads, kv, head, f), **RMS)
    if n_window:
        m.keys["attention.sliding_window"] = n_window
    checks.frame(m, d, tied=False)
    for il in range(n):
        p = f"blk.{il}"
        m.norm(f"{p}.post_attention_norm", d)
        m.norm(f"{p}.post_ffw_norm", d)
        m.attention(p, d, heads, kv, head)
        add_head_norms(m, p, heads, kv, head)
        m.ffn(p, d, f)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(head, 10000.0, POS)
    for il in range(n):
        w = checks.layer_weights(e, il)
        q, k, v = normed_heads(e, w, il, x)
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        visible = (lambda i, j: i - j < n_window) if n_window and il % 4 < 3 else None
        attended = e.output(il, ref.attend(q, k, v, 1 / math.sqrt(head), visible=visible))
        x = x + ref.rms_norm(attended, w["post_attention_norm"], e.eps)
        x = x + ref.rms_norm(e.ffn(il, x), w["post_ffw_norm"], e.eps)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def olmo3() -> tuple[RandomModel, np.ndarray]:
    """Three window layers, one full one."""
    return olmo2(9)


def olmoe() -> tuple[RandomModel, np.ndarray]:
    """Experts whose weights do not add up to one."""
    n, d, heads, kv, head, f, n_expert, used = 2, 64, 2, 2, 32, 32, 8, 3
    keys = {"expert_count": n_expert, "expert_used_count": used}
    m = RandomModel("olmoe", 22, **checks.shape(n, d, heads, kv, head, f), **RMS, **keys)
    checks.frame(m, d, tied=False)
    for il in range(n):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", d)
        m.norm(f"{p}.ffn_norm", d)
        m.attention(p, d, heads, kv, head)
        add_head_norms(m, p, heads, kv, head)
        checks.experts(m, p, d, f, n_expert)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(head, 10000.0, POS)
    for il in range(n):
        w = checks.layer_weights(e, il)
        q, k, v = normed_heads(e, w, il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(head)))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        x = x + checks.routed(w, h, ref.softmax(h @ w["ffn_gate_inp"].T), used)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


@pytest.mark.parametrize("make", [olmo2, olmo3, olmoe], ids=lambda f: f.__name__)
def test_definition_and_peer(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_quantized_cache(path, truth, 0.05)
    checks.check_peer(path, make.__name__, 0.02)
