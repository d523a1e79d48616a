"""Qwen3-Next and Qwen3.5: random models against their definition and other engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N_LAYER, D, HEADS, KV, HEAD, F = 5, 64, 4, 2, 32, 48
KEY_HEADS, VALUE_HEADS, DK, DV, TAPS = 2, 4, 32, 32, 4
ROTATED = 8
N_EXPERT, USED, F_EXP = 8, 3, 24
RATIO = VALUE_HEADS // KEY_HEADS
BOUND = 2e-4  # what the first tokens read from a state is small where q.k cancels, and is normed then
N_KEYS, N_VALUES = DK * KEY_HEADS, DV * VALUE_HEADS


def new_model(arch: str, seed: int, *, experts: bool, n_predict: int = 0) -> RandomModel:
    """All tensors but the input projections of the recurrent layers. n_predict: layers that predict further tokens."""
    keys = {
        **checks.shape(N_LAYER + n_predict, D, HEADS, KV, HEAD, F),
        **({"nextn_predict_layers": n_predict} if n_predict else {}),
        **RMS,
        "rope.dimension_count": ROTATED,
        "rope.dimension_sections": [2, 1, 1, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": TAPS,
        "ssm.inner_size": N_VALUES,
        "ssm.state_size": DK,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.group_count": KEY_HEADS,
    }
    if experts:
        keys |= {
            "expert_count": N_EXPERT,
            "expert_used_count": USED,
            "expert_feed_forward_length": F_EXP,
            "expert_shared_feed_forward_length": F_EXP,
        }
    m = RandomModel(arch, seed, **keys)
    checks.frame(m, D, tied=False)
    for il in range(N_LAYER + n_predict):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.post_attention_norm", D)
        if il < N_LAYER and (il + 1) % 4:
            add_recurrent(m, p)
        else:
            m.attention(p, D, HEADS, KV, HEAD)
            m.matrix(f"{p}.attn_q", 2 * HEADS * HEAD, D)
            m.norm(f"{p}.attn_q_norm", HEAD)
            m.norm(f"{p}.attn_k_norm", HEAD)
        if experts:
            checks.experts(m, p, D, F_EXP, N_EXPERT)
            m.ffn(p, D, F_EXP, "_shexp")
            m.vector(f"{p}.ffn_gate_inp_shexp", D)
        else:
            m.ffn(p, D, F)
    return m


def add_recurrent(m: RandomModel, prefix: str) -> None:
    m.matrix(f"{prefix}.ssm_conv1d", 2 * N_KEYS + N_VALUES, TAPS)
    m.vector(f"{prefix}.ssm_dt.bias", VALUE_HEADS)
    m.weights[f"{prefix}.ssm_a"] = -m.random.uniform(0.1, 2, VALUE_HEADS).astype(np.float32)
    m.norm(f"{prefix}.ssm_norm", DV)
    m.matrix(f"{prefix}.ssm_out", D, N_VALUES)


def recurrent_prefixes() -> list[str]:
    return [f"blk.{il}" for il in range(N_LAYER) if (il + 1) % 4]


Inputs = Callable[[ref.Weights, np.ndarray], tuple[np.ndarray, ...]]
"""Queries [T, Hk, dk], keys, values [T, Hv, dv], their gate z, beta and alpha [T, Hv] of a normed input."""


def separate(w: ref.Weights, h: np.ndarray) -> tuple[np.ndarray, ...]:
    """A matrix for q, k and v, one for z, beta and alpha each."""
    qkv = h @ w["attn_qkv"].T
    z, beta, alpha = (h @ w[name].T for name in ("attn_gate", "ssm_beta", "ssm_alpha"))
    return qkv, z, beta, alpha


def grouped_gates(w: ref.Weights, h: np.ndarray) -> list[np.ndarray]:
    """beta and alpha [T, Hv] of ssm_ba, whose rows are those of a head of keys after the other."""
    both = (h @ w["ssm_ba"].T).reshape(len(h), KEY_HEADS, 2, RATIO)
    return [both[:, :, i].reshape(len(h), VALUE_HEADS) for i in range(2)]


def half_grouped(w: ref.Weights, h: np.ndarray) -> tuple[np.ndarray, ...]:
    """beta and alpha by heads of keys, the others apart."""
    return h @ w["attn_qkv"].T, h @ w["attn_gate"].T, *grouped_gates(w, h)


def grouped(w: ref.Weights, h: np.ndarray) -> tuple[np.ndarray, ...]:
    """All by heads of keys."""
    per_key = RATIO * DV
    rows = (h @ w["ssm_in"].T).reshape(len(h), KEY_HEADS, 2 * DK + 2 * per_key)
    q, k, v, z = (a.reshape(len(h), -1) for a in np.split(rows, [DK, 2 * DK, 2 * DK + per_key], axis=2))
    return np.concatenate([q, k, v], axis=1), z, *grouped_gates(w, h)


def delta_layer(e: Evaluation, w: ref.Weights, h: np.ndarray, inputs: Inputs, *, interleaved: bool) -> np.ndarray:
    """Branch of a recurrent layer for a normed input h [T, D]."""
    qkv, z, beta, alpha = inputs(w, h)
    slots = np.zeros(len(h), int)
    state = np.zeros((1, qkv.shape[1], TAPS - 1))
    mixed, _ = recurrent.causal_conv(qkv, w["ssm_conv1d"], state, slots, silu=True)
    q, k = (a.reshape(-1, KEY_HEADS, DK) for a in (mixed[:, :N_KEYS], mixed[:, N_KEYS : 2 * N_KEYS]))
    v = mixed[:, 2 * N_KEYS :].reshape(-1, VALUE_HEADS, DV)
    g = w["ssm_a"] * np.log1p(np.exp(alpha + w["ssm_dt.bias"]))
    state = np.zeros((1, VALUE_HEADS, DK, DV))
    out, _ = recurrent.gated_delta_rule(
        q, k, v, g, ref.sigmoid(beta), state, slots, l2_eps=1e-6, scale=DK**-0.5, interleaved=interleaved
    )
    normed = ref.rms_norm(out, w["ssm_norm"], e.eps).reshape(len(h), -1)
    return (normed * ref.silu(z)) @ w["ssm_out"].T


def attention_layer(e: Evaluation, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a layer of gated attention for a normed input h [T, D]."""
    q, gate = np.split((h @ w["attn_q"].T).reshape(-1, HEADS, 2 * HEAD), 2, axis=2)
    k, v = ((h @ w[f"attn_{n}"].T).reshape(-1, KV, HEAD) for n in "kv")
    q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
    angles = ref.plain_angles(ROTATED, 10000.0, POS)
    q, k = (np.concatenate([ref.rotate(t[..., :ROTATED], angles, neox=True), t[..., ROTATED:]], -1) for t in (q, k))
    attended = ref.attend(q, k, v, 1 / math.sqrt(HEAD)).reshape(len(h), -1)
    return (attended * ref.sigmoid(gate.reshape(len(h), -1))) @ w["attn_output"].T


def evaluated(m: RandomModel, inputs: Inputs, *, interleaved: bool) -> np.ndarray:
    """Logits [T, V] of TOKENS."""
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        x = x + (delta_layer(e, w, h, inputs, interleaved=interleaved) if (il + 1) % 4 else attention_layer(e, w, h))
        x = x + feed_forward(e, il, w, ref.rms_norm(x, w["post_attention_norm"], e.eps))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def feed_forward(e: Evaluation, il: int, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of the network, or of the experts, for a normed input h [T, D]."""
    if "ffn_gate_inp" not in w:
        return e.ffn(il, h)
    weights = checks.chosen(ref.softmax(h @ w["ffn_gate_inp"].T), USED)
    shared = e.ffn(il, h, suffix="_shexp") * ref.sigmoid(h @ w["ffn_gate_inp_shexp"])[:, None]
    return checks.routed(w, h, weights / weights.sum(-1, keepdims=True), USED) + shared


# layers that predict further tokens


def predicting(arch: str, *, experts: bool) -> RandomModel:
    """A model with such a layer, which attends though its number is that of a recurrent one."""
    m = new_model(arch, 65, experts=experts, n_predict=1)
    for p in recurrent_prefixes():
        m.matrix(f"{p}.attn_qkv", 2 * N_KEYS + N_VALUES, D)
        m.matrix(f"{p}.attn_gate", N_VALUES, D)
        for name, n in (("ssm_ba", 2),) if arch == "qwen3next" else (("ssm_beta", 1), ("ssm_alpha", 1)):
            m.matrix(f"{p}.{name}", n * VALUE_HEADS, D)
    p = f"blk.{N_LAYER}.nextn"
    m.matrix(f"{p}.eh_proj", D, 2 * D)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        m.norm(f"{p}.{name}", D)
    return m


def head_logits(m: RandomModel, states: np.ndarray) -> np.ndarray:
    """What the layer makes of TOKENS and the states [T, D] behind the tokens before them, in float64."""
    e = Evaluation(m)
    w = checks.layer_weights(e, N_LAYER)
    embedded = ref.rms_norm(e.w["token_embd"][TOKENS], w["nextn.enorm"], e.eps)
    x = np.concatenate([embedded, ref.rms_norm(states, w["nextn.hnorm"], e.eps)], axis=1) @ w["nextn.eh_proj"].T
    x = x + attention_layer(e, w, ref.rms_norm(x, w["attn_norm"], e.eps))
    x = x + feed_forward(e, N_LAYER, w, ref.rms_norm(x, w["post_attention_norm"], e.eps))
    return ref.rms_norm(x, w["nextn.shared_head_norm"], e.eps) @ e.w["output"].T


@pytest.mark.parametrize(("arch", "experts"), [("qwen35", False), ("qwen35moe", True), ("qwen3next", True)])
def test_prediction_layers(arch: str, experts: bool, tmp_path: Path) -> None:
    m = predicting(arch, experts=experts)
    model = Model.load(m.write(tmp_path / "model.gguf"))
    assert model.hparams.n_layer == N_LAYER and model.arch.is_recurrent
    head = model.prediction_head()
    assert not head.arch.is_recurrent
    states = np.random.default_rng(1).standard_normal((len(TOKENS), D)).astype(np.float32)
    context = Context(head, ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"))
    found = context.decode(Batch.single(TOKENS, logits="all"), states)
    truth = head_logits(m, states.astype(np.float64))
    error = np.abs(found - truth).max(axis=1) / np.abs(truth).max()
    assert error.max() < 5e-5, f"position {error.argmax()} off by {error.max():.1e} relative"


def qwen35() -> tuple[RandomModel, np.ndarray]:
    """Dense layers."""
    m = new_model("qwen35", 61, experts=False)
    add_separate(m)
    return m, evaluated(m, separate, interleaved=False)


def qwen35moe() -> tuple[RandomModel, np.ndarray]:
    """Experts beside a shared one."""
    m = new_model("qwen35moe", 62, experts=True)
    add_separate(m)
    return m, evaluated(m, separate, interleaved=False)


def qwen3next() -> tuple[RandomModel, np.ndarray]:
    """Files of today."""
    m = new_model("qwen3next", 63, experts=True)
    for p in recurrent_prefixes():
        m.matrix(f"{p}.attn_qkv", 2 * N_KEYS + N_VALUES, D)
        m.matrix(f"{p}.attn_gate", N_VALUES, D)
        m.matrix(f"{p}.ssm_ba", 2 * VALUE_HEADS, D)
    return m, evaluated(m, half_grouped, interleaved=True)


def qwen3next_grouped() -> tuple[RandomModel, np.ndarray]:
    """The first files, with one input matrix as published."""
    m = new_model("qwen3next", 64, experts=True)
    for p in recurrent_prefixes():
        m.matrix(f"{p}.ssm_in", 2 * N_KEYS + 2 * N_VALUES, D)
        m.matrix(f"{p}.ssm_ba", 2 * VALUE_HEADS, D)
    return m, evaluated(m, grouped, interleaved=True)


def add_separate(m: RandomModel) -> None:
    for p in recurrent_prefixes():
        m.matrix(f"{p}.attn_qkv", 2 * N_KEYS + N_VALUES, D)
        m.matrix(f"{p}.attn_gate", N_VALUES, D)
        m.matrix(f"{p}.ssm_beta", VALUE_HEADS, D)
        m.matrix(f"{p}.ssm_alpha", VALUE_HEADS, D)


MODELS = [qwen35, qwen35moe, qwen3next, qwen3next_grouped]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Callable[[], tuple[RandomModel, np.ndarray]], tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path, BOUND)
    checks.check_quantized_cache(path, truth, 0.05)
    checks.check_peer(path, make.__name__, 5e-3)
