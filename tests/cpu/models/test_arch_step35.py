"""Step-3.5-Flash (step35): random models against their definition and other engines."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import FileFormatError, UnsupportedError
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N, D, KV, HEAD, F, F_SHARED, F_DENSE = 3, 64, 1, 64, 32, 48, 76
N_EXPERT, USED, SCALE, WINDOW = 8, 3, 3.0, 9
IS_WINDOW = [False, True, True, True]  # the last layer predicts
HEADS = [2, 3, 3, 2]
BASE, WINDOW_BASE = 5e6, 1e4
LIMITS, SHARED_LIMITS = [0.0, 0.0, 0.4, 0.0], [0.0, 0.0, 0.9, 0.7]


def bounded(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, limit: float) -> np.ndarray:
    """SwiGLU whose two factors are bounded (limit 0: not)."""
    g, u = ref.silu(x @ gate.T), x @ up.T
    if limit:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return (g * u) @ down.T


def experts(w: ref.Weights, h: np.ndarray, limit: float) -> np.ndarray:
    """Experts by sigmoid with a selection bias."""
    weights = checks.chosen(ref.sigmoid(h @ w["ffn_gate_inp"].T), USED, w["exp_probs_b.bias"])
    weights *= SCALE / weights.sum(-1, keepdims=True)
    matrices = [w[f"ffn_{name}_exps"] for name in ("gate", "up", "down")]
    return sum(weights[:, [c]] * bounded(h, *(t[c] for t in matrices), limit) for c in range(N_EXPERT))


def layer(e: Evaluation, il: int, x: np.ndarray) -> np.ndarray:
    """One block on x [T, D]."""
    w = checks.layer_weights(e, il)
    h = ref.rms_norm(x, w["attn_norm"], e.eps)
    q, k, v = e.qkv(il, h)
    q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
    angles = ref.plain_angles(HEAD // 2, BASE, POS, e.w["rope_freqs"][: HEAD // 4])
    if IS_WINDOW[il]:
        angles = ref.plain_angles(HEAD, WINDOW_BASE, POS)
    q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
    visible = (lambda i, j: i - j < WINDOW) if IS_WINDOW[il] else None
    a = ref.attend(q, k, v, 1 / math.sqrt(HEAD), visible=visible).reshape(len(h), HEADS[il], HEAD)
    a = a * ref.sigmoid(h @ w["attn_gate"].T)[:, :, None]
    x = x + e.output(il, a.reshape(len(h), -1))
    h = ref.rms_norm(x, w["ffn_norm"], e.eps)
    if "ffn_gate" in w:
        return x + bounded(h, *(w[f"ffn_{name}"] for name in ("gate", "up", "down")), SHARED_LIMITS[il])
    shared = (w[f"ffn_{name}_shexp"] for name in ("gate", "up", "down"))
    return x + experts(w, h, LIMITS[il]) + bounded(h, *shared, SHARED_LIMITS[il])


def step35(n_predict: int = 0) -> tuple[RandomModel, np.ndarray]:
    """A full dense layer, then window layers with more heads, all of whose elements are rotated.

    n_predict: 1 for a layer that predicts further tokens.
    """
    n = N + n_predict
    keys = {
        "rope.freq_base": BASE,
        "rope.freq_base_swa": WINDOW_BASE,
        "attention.head_count": HEADS[:n],
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": IS_WINDOW[:n],
        "expert_count": N_EXPERT,
        "expert_used_count": USED,
        "expert_feed_forward_length": F,
        "expert_shared_feed_forward_length": F_SHARED,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "swiglu_clamp_exp": LIMITS[:n],
        "swiglu_clamp_shexp": SHARED_LIMITS[:n],
    }
    m = RandomModel("step35", 81, **{**checks.shape(n, D, 1, KV, HEAD, F_DENSE), **RMS, **keys})
    if n_predict:
        m.keys["nextn_predict_layers"] = n_predict
    checks.frame(m, D, tied=False)
    m.norm("rope_freqs", HEAD // 2)
    for il in range(n):
        p = f"blk.{il}"
        for name, size in (("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            m.norm(f"{p}.{name}", size)
        m.attention(p, D, HEADS[il], KV, HEAD)
        m.matrix(f"{p}.attn_gate", HEADS[il], D)
        if 0 < il < N:
            checks.experts(m, p, D, F, N_EXPERT)
            m.vector(f"{p}.exp_probs_b.bias", N_EXPERT)
            m.ffn(p, D, F_SHARED, "_shexp")
        else:
            m.ffn(p, D, F_DENSE)
    if n_predict:
        m.matrix(f"blk.{N}.nextn.eh_proj", D, 2 * D)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            m.norm(f"blk.{N}.nextn.{name}", D)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(N):
        x = layer(e, il, x)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def test_definition_and_peer(tmp_path: Path) -> None:
    model, truth = step35()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.05)
    checks.check_peer(path, "step35", 0.02)


def test_other_names_of_the_limits(tmp_path: Path) -> None:
    """Files of earlier converters call the bounds swiglu_limits."""
    model, truth = step35()
    for name, other in (("swiglu_clamp_exp", "swiglu_limits"), ("swiglu_clamp_shexp", "swiglu_limits_shared")):
        model.keys[other] = model.keys.pop(name)
    checks.check_definition(model, truth, tmp_path)


def test_bounds_below_zero_are_none(tmp_path: Path) -> None:
    """As in llama.cpp."""
    model, _ = step35()
    path = model.write(tmp_path / "bounded.gguf")
    overrides = {"step35.swiglu_clamp_exp": -0.5, "step35.swiglu_clamp_shexp": -0.5}
    found = logits_of(path, overrides)
    np.testing.assert_array_equal(found, logits_of(path, dict.fromkeys(overrides, 0.0)))
    assert np.abs(found - logits_of(path, {})).max() > 0.1


def logits_of(path: Path, overrides: dict[str, float]) -> np.ndarray:
    """Logits of the last token."""
    model = Model.load(path, ModelParams(kv_overrides=overrides))
    return Context(model, ContextParams(n_ctx=256, n_threads=1)).decode(Batch.single(TOKENS))


def test_prediction_layer(tmp_path: Path) -> None:
    """It has window, heads and bounds of its own, no experts, and no part in the model's own logits."""
    model, truth = step35(1)
    path = checks.check_definition(model, truth, tmp_path)
    states = np.random.default_rng(1).normal(size=(len(TOKENS), D)).astype(np.float32)
    e = Evaluation(model)
    w = checks.layer_weights(e, N)
    parts = (
        ref.rms_norm(e.w["token_embd"][TOKENS], w["nextn.enorm"], e.eps),
        ref.rms_norm(states.astype(np.float64), w["nextn.hnorm"], e.eps),
    )
    x = layer(e, N, np.concatenate(parts, axis=1) @ w["nextn.eh_proj"].T)
    wanted = ref.rms_norm(x, w["nextn.shared_head_norm"], e.eps) @ e.w["output"].T
    context = Context(Model.load(path).prediction_head(), ContextParams(n_ctx=256, type_k="f32", type_v="f32"))
    error = np.abs(context.decode(Batch.single(TOKENS, logits="all"), states) - wanted).max(axis=1)
    worst = error.max() / np.abs(wanted).max()
    assert worst < checks.FLOAT_BOUND, f"position {error.argmax()} off by {worst:.1e} relative"


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"swiglu_clamp_exp": [0.0]}, FileFormatError, "swiglu_clamp_exp must hold 3 floats, one per layer"),
        ({"swiglu_clamp_exp": [0.5, math.nan, 0.5]}, FileFormatError, "swiglu_clamp_exp holds numbers that are not"),
        ({"rope.freq_base_per_layer": [1.0] * N}, UnsupportedError, "rope.freq_base_per_layer: RoPE bases layer by"),
        ({"attention.sliding_window_pattern": [True]}, FileFormatError, "wrong array length; expected 3, got 1"),
    ],
)
def test_impossible_files(keys: dict, error: type[Exception], message: str, tmp_path: Path) -> None:
    model, _ = step35()
    model.keys |= keys
    with pytest.raises(error, match=message):
        Model.load(model.write(tmp_path / "model.gguf"))
