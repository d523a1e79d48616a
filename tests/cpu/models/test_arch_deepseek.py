"""DeepSeek V1, Ling 1 and InternLM 2: random models against their definition, llama.cpp and ik_llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.model import Model
from ikpy.errors import UnsupportedError
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel


def routed_model(arch: str, seed: int, n_dense: int, **keys: object) -> tuple[RandomModel, np.ndarray]:
    """Leading dense layers, then softmax-routed experts beside shared ones."""
    n, d, heads, head, f, f_exp, n_expert, used = 3, 64, 2, 32, 60, 32, 8, 3
    kv = 2 if arch == "deepseek2-ocr" else 1
    keys = {
        "leading_dense_block_count": n_dense,
        "expert_count": n_expert,
        "expert_used_count": used,
        "expert_feed_forward_length": f_exp,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.5,
        **keys,
    }
    m = RandomModel(arch, seed, **checks.shape(n, d, heads, kv, head, f), **RMS, **keys)
    checks.frame(m, d, tied=False)
    for il in range(n):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", d)
        m.norm(f"{p}.ffn_norm", d)
        m.attention(p, d, heads, kv, head)
        if il < n_dense:
            m.ffn(p, d, f)
        else:
            checks.experts(m, p, d, f_exp, n_expert)
            m.ffn(p, d, 2 * f_exp, "_shexp")
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(head, 10000.0, POS)
    for il in range(n):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=arch == "deepseek2-ocr") for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(head)))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        if il < n_dense:
            x = x + e.ffn(il, h)
            continue
        weights = ref.softmax(h @ w["ffn_gate_inp"].T)
        if keys.get("expert_weights_norm"):
            weights = weights / np.sort(weights)[:, -used:].sum(-1, keepdims=True)
        x = x + 1.5 * checks.routed(w, h, weights, used) + e.ffn(il, h, suffix="_shexp")
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def deepseek() -> tuple[RandomModel, np.ndarray]:
    """One dense layer."""
    return routed_model("deepseek", 31, 1)


def bailingmoe() -> tuple[RandomModel, np.ndarray]:
    """Weights that are renormalised."""
    return routed_model("bailingmoe", 32, 0, expert_weights_norm=True)


def deepseek2_ocr() -> tuple[RandomModel, np.ndarray]:
    """As many heads of keys as of queries."""
    return routed_model("deepseek2-ocr", 34, 1)


def internlm2() -> tuple[RandomModel, np.ndarray]:
    """Dense layers with pairs of neighbouring elements rotated."""
    n, d, heads, kv, head, f = 2, 96, 3, 1, 32, 52
    m = RandomModel("internlm2", 33, **checks.shape(n, d, heads, kv, head, f), **RMS)
    checks.frame(m, d, tied=False)
    for il in range(n):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", d)
        m.norm(f"{p}.ffn_norm", d)
        m.attention(p, d, heads, kv, head)
        m.ffn(p, d, f)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(head, 10000.0, POS)
    for il in range(n):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=False) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(head)))
        x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


@pytest.mark.parametrize("make", [deepseek, bailingmoe, deepseek2_ocr, internlm2], ids=lambda f: f.__name__)
def test_definition_and_peer(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_quantized_cache(path, truth, 0.05)
    if make is not deepseek2_ocr:
        checks.check_peer(path, make.__name__, 0.02)


def test_settings_of_deepseek_ocr(tmp_path: Path) -> None:
    """Files may be without a factor; experts are weighed by softmax alone."""
    model, _ = deepseek2_ocr()
    model.keys.pop("expert_weights_scale")
    loaded = Model.load(str(model.write(tmp_path / "plain.gguf")))
    assert loaded.hparams.routing.scale == 1
    model.keys["expert_gating_func"] = 2
    with pytest.raises(UnsupportedError, match="expert_gating_func 2 is not supported"):
        Model.load(str(model.write(tmp_path / "sigmoid.gguf")))
