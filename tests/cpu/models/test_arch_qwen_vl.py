"""Text of Qwen2-VL, Qwen3-VL and its MoE form: random models against their definition and other engines."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N, D, HEADS, KV, HEAD, F = 2, 128, 4, 2, 32, 76
BASE = 1e6
SECTIONS = {"rope.dimension_sections": [8, 4, 4, 0], "rope.freq_base": BASE}


def logits(e: Evaluation, x: np.ndarray) -> np.ndarray:
    """Output matrix on the normed states."""
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def qwen2vl() -> tuple[RandomModel, np.ndarray]:
    """Biased projections; the three parts of a text's positions are equal, so its rotation has no sections."""
    m = RandomModel("qwen2vl", 31, **checks.shape(N, D, HEADS, KV, HEAD, F), **RMS, **SECTIONS)
    checks.frame(m, D, tied=False)
    for il in range(N):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        for name, n in (("q", HEADS), ("k", KV), ("v", KV)):
            m.vector(f"{p}.attn_{name}.bias", n * HEAD)
        m.ffn(p, D, F)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(HEAD, BASE, POS)
    for il in range(N):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return m, logits(e, x)


def qwen3vl(n_expert: int = 0) -> tuple[RandomModel, np.ndarray]:
    """Norms of every head; experts, if any, weigh by softmax over all, renormalised."""
    used = 3
    keys = {**SECTIONS, "n_deepstack_layers": 1}
    if n_expert:
        keys |= {"expert_count": n_expert, "expert_used_count": used, "expert_feed_forward_length": F}
    m = RandomModel(
        "qwen3vlmoe" if n_expert else "qwen3vl", 32, **checks.shape(N, D, HEADS, KV, HEAD, F), **RMS, **keys
    )
    checks.frame(m, D, tied=False)
    for il in range(N):
        p = f"blk.{il}"
        for name, size in (("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            m.norm(f"{p}.{name}", size)
        m.attention(p, D, HEADS, KV, HEAD)
        if n_expert:
            checks.experts(m, p, D, F, n_expert)
        else:
            m.ffn(p, D, F)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(HEAD, BASE, POS)
    for il in range(N):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q = ref.rotate(ref.rms_norm(q, w["attn_q_norm"], e.eps), angles, neox=True)
        k = ref.rotate(ref.rms_norm(k, w["attn_k_norm"], e.eps), angles, neox=True)
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        if n_expert:
            weights = checks.chosen(ref.softmax(h @ w["ffn_gate_inp"].T), used)
            x = x + checks.routed(w, h, weights / weights.sum(-1, keepdims=True), used)
        else:
            x = x + e.ffn(il, h)
    return m, logits(e, x)


def qwen3vlmoe() -> tuple[RandomModel, np.ndarray]:
    """Eight experts, three in use."""
    return qwen3vl(8)


@pytest.mark.parametrize("make", [qwen2vl, qwen3vl, qwen3vlmoe], ids=lambda f: f.__name__)
def test_definition_and_peer(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_quantized_cache(path, truth, 0.05)
    checks.check_peer(path, make.__name__, 0.02)
