"""MiMo-V2-Flash (mimo2): random models against their definition and other engines."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N, D, HEADS, HEAD_K, HEAD_V, N_ROT, F, F_DENSE = 3, 64, 4, 192, 128, 64, 32, 76
N_EXPERT, USED, WINDOW = 8, 3, 9
IS_WINDOW = [False, True, True]
KV_HEADS = [1, 2, 2]
BASE, WINDOW_BASE = 5e6, 1e4


def mimo2(value_scale: float = 1.0) -> tuple[RandomModel, np.ndarray]:
    """A full dense layer, then window layers with sinks and experts; value_scale multiplies the values."""
    keys = {
        "attention.value_length": HEAD_V,
        "rope.dimension_count": N_ROT,
        "rope.freq_base": BASE,
        "rope.freq_base_swa": WINDOW_BASE,
        "attention.head_count": [HEADS] * N,
        "attention.head_count_kv": KV_HEADS,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": IS_WINDOW,
        "expert_count": N_EXPERT,
        "expert_used_count": USED,
        "expert_feed_forward_length": F,
    }
    if value_scale != 1.0:
        keys["attention.value_scale"] = value_scale
    m = RandomModel("mimo2", 71, **{**checks.shape(N, D, HEADS, 1, HEAD_K, F_DENSE), **RMS, **keys})
    checks.frame(m, D, tied=False)
    for il in range(N):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        for name, n in (("q", HEADS * HEAD_K), ("k", KV_HEADS[il] * HEAD_K), ("v", KV_HEADS[il] * HEAD_V)):
            m.matrix(f"{p}.attn_{name}", n, D)
        m.matrix(f"{p}.attn_output", D, HEADS * HEAD_V)
        if IS_WINDOW[il]:
            m.vector(f"{p}.attn_sinks", HEADS)
            checks.experts(m, p, D, F, N_EXPERT)
            m.vector(f"{p}.exp_probs_b.bias", N_EXPERT)
        else:
            m.ffn(p, D, F_DENSE)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(N):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        angles = ref.plain_angles(N_ROT, WINDOW_BASE if IS_WINDOW[il] else BASE, POS)
        q, k = (ref.rotate(e.heads(f"blk.{il}.attn_{name}", h), angles, neox=True) for name in "qk")
        v = value_scale * (h @ w["attn_v"].T).reshape(len(h), KV_HEADS[il], HEAD_V)
        visible = (lambda i, j: i - j < WINDOW) if IS_WINDOW[il] else None
        a = ref.attend(q, k, v, 1 / math.sqrt(HEAD_K), visible=visible, sinks=w.get("attn_sinks"))
        x = x + e.output(il, a)
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        x = x + (checks.sigmoid_routed(w, h, USED) if IS_WINDOW[il] else e.ffn(il, h))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def mimo2_scaled() -> tuple[RandomModel, np.ndarray]:
    """Values multiplied as in the published model."""
    return mimo2(0.707)


@pytest.mark.parametrize("make", [mimo2, mimo2_scaled], ids=lambda f: f.__name__)
def test_definition_and_peer(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.05)
    checks.check_peer(path, make.__name__, 0.02)
