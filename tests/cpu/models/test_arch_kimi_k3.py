"""Kimi K3: random models against their definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models.definition_checks import LONG, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

D, HEADS, F = 64, 3, 96
NOPE, ROT, VALUE, RANK, Q_RANK = 32, 32, 32, 64, 24
SIZE, TAPS, LOWER = 32, 4, -5.0
C = SIZE * HEADS
N_EXPERT, USED, LATENT, F_EXP, N_SHARED, SCALE = 10, 3, 32, 64, 2, 2.8
BETA, LINEAR_BETA = 1.5, 2.5
BOUND = 2e-4  # what the first tokens read from a state is small where q.k cancels, and is normed then


def new_model(seed: int, *, published: bool, n_layer: int, attends: tuple[int, ...], block: int) -> RandomModel:
    """published: latent experts, bounded decays, gates of attention and low-rank queries; else none of these.

    block: every which layer banks the residual stream.
    """
    keys: dict[str, Any] = {
        **checks.shape(n_layer, D, HEADS, 1, RANK + ROT, F),
        **RMS,
        "attention.head_count_kv": [int(il in attends) for il in range(n_layer)],
        "attention.key_length_mla": NOPE + ROT,
        "attention.value_length": RANK,
        "attention.value_length_mla": VALUE,
        "attention.kv_lora_rank": RANK,
        "rope.dimension_count": ROT,
        "ssm.conv_kernel": TAPS,
        "kda.head_dim": SIZE,
        "expert_count": N_EXPERT,
        "expert_used_count": USED,
        "expert_feed_forward_length": F_EXP,
        "expert_shared_count": N_SHARED,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "attn_res.block_size": block,
        "activation.situ_beta": BETA,
        "activation.situ_linear_beta": LINEAR_BETA if published else 0.0,
    }
    if published:
        keys |= {"attention.q_lora_rank": Q_RANK, "kda.gate_lower_bound": LOWER, "expert_latent_length": LATENT}
    m = RandomModel("kimi-k3", seed, **keys)
    checks.frame(m, D, tied=False)
    add_score(m, "output_res_score")
    for il in range(n_layer):
        p = f"blk.{il}"
        for name in ("attn_norm", "ffn_norm"):
            m.norm(f"{p}.{name}", D)
        for name in ("attn_res_score", "ffn_res_score"):
            add_score(m, f"{p}.{name}")
        add = add_attention if il in attends else add_recurrent
        add(m, p, published)
        if il == 0:
            m.ffn(p, D, F)
        else:
            add_experts(m, p, published)
    return m


def add_score(m: RandomModel, name: str) -> None:
    """Scores of some 1: larger ones choose a single stream, by differences that no float can hold."""
    m.weights[name] = m.random.normal(0, D**-0.5, D).astype(np.float32)


def add_recurrent(m: RandomModel, p: str, published: bool) -> None:
    for name in "qkv":
        m.matrix(f"{p}.attn_{name}", C, D)
        m.matrix(f"{p}.ssm_conv1d_{name}", C, 1, TAPS)
    m.matrix(f"{p}.ssm_f_a", SIZE, D)
    m.matrix(f"{p}.ssm_f_b", C, SIZE)
    m.matrix(f"{p}.ssm_g", C, D)
    m.vector(f"{p}.ssm_dt.bias", C)
    m.weights[f"{p}.ssm_a"] = -m.random.uniform(0.1, 2, HEADS).astype(np.float32)
    m.matrix(f"{p}.ssm_beta", HEADS, D)
    m.norm(f"{p}.ssm_norm", SIZE)
    m.matrix(f"{p}.attn_output", D, C)


def add_attention(m: RandomModel, p: str, published: bool) -> None:
    if published:
        m.matrix(f"{p}.attn_q_a", Q_RANK, D)
        m.norm(f"{p}.attn_q_a_norm", Q_RANK)
        m.matrix(f"{p}.attn_q_b", HEADS * (NOPE + ROT), Q_RANK)
        m.matrix(f"{p}.attn_gate", HEADS * VALUE, D)
    else:
        m.matrix(f"{p}.attn_q", HEADS * (NOPE + ROT), D)
    m.matrix(f"{p}.attn_k_b", HEADS, RANK, NOPE)
    m.matrix(f"{p}.attn_v_b", HEADS, VALUE, RANK)
    m.matrix(f"{p}.attn_kv_a_mqa", RANK + ROT, D)
    m.norm(f"{p}.attn_kv_a_norm", RANK)
    m.matrix(f"{p}.attn_output", D, HEADS * VALUE)


def add_experts(m: RandomModel, p: str, published: bool) -> None:
    n = LATENT if published else D
    m.matrix(f"{p}.ffn_gate_inp", N_EXPERT, D)
    m.vector(f"{p}.exp_probs_b.bias", N_EXPERT)
    for name, rows, columns in (("gate", F_EXP, n), ("up", F_EXP, n), ("down", n, F_EXP)):
        m.matrix(f"{p}.ffn_{name}_exps", N_EXPERT, rows, columns)
    m.ffn(p, D, F_EXP * N_SHARED, "_shexp")
    if published:
        m.matrix(f"{p}.ffn_routed_down", LATENT, D)
        m.matrix(f"{p}.ffn_routed_up", D, LATENT)
        m.norm(f"{p}.ffn_routed_norm", LATENT)


def delta_layer(e: Evaluation, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a KDA layer for a normed input h [T, D]."""
    slots = np.zeros(len(h), int)

    def convolved(name: str) -> np.ndarray:
        past, taps = np.zeros((1, C, TAPS - 1)), w[f"ssm_conv1d_{name}"].reshape(C, TAPS)
        x, _ = recurrent.causal_conv(h @ w[f"attn_{name}"].T, taps, past, slots, silu=True)
        return x.reshape(-1, HEADS, SIZE)

    q, k, v = (convolved(name) for name in "qkv")
    raw = (h @ w["ssm_f_a"].T @ w["ssm_f_b"].T + w["ssm_dt.bias"]).reshape(-1, HEADS, SIZE)
    rate, lower = -w["ssm_a"].reshape(HEADS, 1), e.keys.get("kda.gate_lower_bound")
    decay = -rate * np.log1p(np.exp(raw)) if lower is None else lower * ref.sigmoid(rate * raw)
    state = np.zeros((1, HEADS, SIZE, SIZE))
    out, _ = recurrent.gated_delta_rule(
        q,
        k,
        v,
        decay,
        ref.sigmoid(h @ w["ssm_beta"].T),
        state,
        slots,
        l2_eps=1e-6,
        scale=SIZE**-0.5,
        interleaved=False,
    )
    normed = ref.rms_norm(out, w["ssm_norm"], e.eps).reshape(len(h), C)
    return (normed * ref.sigmoid(h @ w["ssm_g"].T)) @ w["attn_output"].T


def attention_layer(e: Evaluation, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a layer of latent attention without positions for a normed input h [T, D]."""
    if "attn_q" in w:
        q = h @ w["attn_q"].T
    else:
        q = ref.rms_norm(h @ w["attn_q_a"].T, w["attn_q_a_norm"], e.eps) @ w["attn_q_b"].T
    latent, shared = np.split(h @ w["attn_kv_a_mqa"].T, [RANK], axis=1)
    latent = ref.rms_norm(latent, w["attn_kv_a_norm"], e.eps)
    own = np.einsum("tr,hrn->thn", latent, w["attn_k_b"])
    v = np.einsum("tr,hnr->thn", latent, w["attn_v_b"])
    k = np.concatenate([own, np.repeat(shared[:, None], HEADS, 1)], axis=2)
    attended = ref.attend(q.reshape(len(h), HEADS, -1), k, v, 1 / math.sqrt(NOPE + ROT))
    if "attn_gate" in w:
        attended = attended * ref.sigmoid(h @ w["attn_gate"].T)
    return attended @ w["attn_output"].T


def network(e: Evaluation, w: ref.Weights, h: np.ndarray, suffix: str = "") -> np.ndarray:
    """A network of weights [F, n] and [n, F] whose factors are bounded by tanh."""
    gate, up, linear = h @ w[f"ffn_gate{suffix}"].T, h @ w[f"ffn_up{suffix}"].T, e.keys["activation.situ_linear_beta"]
    if linear:
        up = linear * np.tanh(up / linear)
    return (BETA * np.tanh(gate / BETA) * ref.sigmoid(gate) * up) @ w[f"ffn_down{suffix}"].T


def experts(e: Evaluation, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Routed experts, on latents if the layer has them, and shared ones."""
    weights = checks.chosen(ref.sigmoid(h @ w["ffn_gate_inp"].T), USED, w["exp_probs_b.bias"])
    weights *= SCALE / weights.sum(1, keepdims=True)
    x = h @ w["ffn_routed_down"].T if "ffn_routed_down" in w else h
    out = np.zeros_like(x)
    for expert in range(N_EXPERT):
        own = {name: values[expert] for name, values in w.items() if name.endswith("_exps")}
        out += weights[:, expert, None] * network(e, own, x, "_exps")
    if "ffn_routed_up" in w:
        out = ref.rms_norm(out, w["ffn_routed_norm"], e.eps) @ w["ffn_routed_up"].T
    return out + network(e, w, h, "_shexp")


def mix(e: Evaluation, bank: list[np.ndarray], x: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Streams [T, D] weighted by the softmax of what score gives for each of them, normed."""
    streams = np.stack([*bank, x], axis=1)
    scores = ref.rms_norm(streams, 1.0, e.eps) @ score
    return (ref.softmax(scores)[..., None] * streams).sum(1)


def evaluated(m: RandomModel, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits [T, V] in float64."""
    e = Evaluation(m)
    bank: list[np.ndarray] = []
    x = e.w["token_embd"][tokens]
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(mix(e, bank, x, w["attn_res_score"]), w["attn_norm"], e.eps)
        branch = attention_layer if "attn_kv_a_mqa" in w else delta_layer
        if il % e.keys["attn_res.block_size"] == 0:
            bank.append(x)
            x = branch(e, w, h)
        else:
            x = x + branch(e, w, h)
        h = ref.rms_norm(mix(e, bank, x, w["ffn_res_score"]), w["ffn_norm"], e.eps)
        x = x + (experts(e, w, h) if il else network(e, w, h))
    return ref.rms_norm(mix(e, bank, x, e.w["output_res_score"]), e.w["output_norm"], e.eps) @ e.w["output"].T


def kimi_k3() -> tuple[RandomModel, np.ndarray]:
    """As published; the last layer starts a residual stream."""
    m = new_model(95, published=True, n_layer=7, attends=(2, 5), block=2)
    return m, evaluated(m)


def kimi_k3_plain() -> tuple[RandomModel, np.ndarray]:
    """What files may leave out; the last layer goes on with its stream."""
    m = new_model(96, published=False, n_layer=6, attends=(1, 5), block=4)
    return m, evaluated(m)


MODELS = [kimi_k3, kimi_k3_plain]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Callable[[], tuple[RandomModel, np.ndarray]], tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path, BOUND)
    checks.check_quantized_cache(path, truth, 0.05)


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_modes_of_latent_attention(
    make: Callable[[], tuple[RandomModel, np.ndarray]], mla: int, tmp_path: Path
) -> None:
    model, _ = make()
    checks.check_latent_mode(model, evaluated(model, LONG), mla, tmp_path, BOUND)


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_states_of_tokens_without_logits(make: Callable[[], tuple[RandomModel, np.ndarray]], tmp_path: Path) -> None:
    """They mix streams of all tokens, logits those of the output rows."""
    path, rows = make()[0].write(tmp_path / "model.gguf"), []
    for batch in (Batch.single(TOKENS, logits="all"), Batch.single(TOKENS)):
        settings = ContextParams(n_ctx=64, n_threads=1, type_k="f32", type_v="f32", token_states=True)
        context = Context(Model.load(path), settings)
        logits = context.decode(batch)
        assert context.token_states is not None and context.token_states.shape == (len(TOKENS), D)
        rows.append((context.token_states, logits[-1]))
    for whole, last in zip(*rows, strict=True):
        np.testing.assert_allclose(last, whole, rtol=1e-4, atol=1e-5)


WRONG = {
    "kda.gate_lower_bound is 0, not below 0": ("kda.gate_lower_bound", 0.0),
    "attn_res.block_size is 0": ("attn_res.block_size", 0),
    "activation.situ_beta is -1, not above 0": ("activation.situ_beta", -1.0),
    "impossible KDA layers: head_dim 0, conv_kernel 4": ("kda.head_dim", 0),
    "tensor 'blk.1.ffn_gate_exps.weight' has wrong shape": ("expert_latent_length", 16),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be(message: str, tmp_path: Path) -> None:
    model = kimi_k3()[0]
    key, value = WRONG[message]
    model.keys[key] = value
    with pytest.raises(IkpyError, match=message) as error:
        Model.load(model.write(tmp_path / "model.gguf"))
    assert "\n" not in str(error.value)
