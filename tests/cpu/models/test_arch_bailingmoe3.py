"""Ling 3.0: random models against their definition."""

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
from ikpy.engine.speculative import SpeculativeParams
from ikpy.errors import IkpyError
from ikpy.llm import LLM
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models.definition_checks import LONG, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N_LAYER, D, HEADS, F = 6, 64, 3, 96
NOPE, ROT, VALUE, RANK, Q_RANK = 32, 32, 32, 64, 24
SIZE, TAPS, LOWER = 32, 4, -3.5
C = SIZE * HEADS
N_EXPERT, N_GROUP, USED_GROUPS, USED, F_EXP, F_SHARED, SCALE = 12, 4, 2, 3, 32, 64, 2.5
ATTENDS, N_DENSE = (2, 5), 1
LIMITS, SHARED_LIMITS = [0.0] * 3 + [0.3, 0.0, 0.4], [0.6] + [0.0] * 3 + [0.2, 0.5]
ENDS = ("exp", "shexp")
BASE = 3000.0
BOUND = 2e-4  # what the first tokens read from a state is small where q.k cancels, and is normed then


def new_model(seed: int, *, low_rank: bool, is_limited: bool = False, predicts: bool = False) -> RandomModel:
    """low_rank: queries; is_limited: SwiGLU; predicts: a layer that predicts a further token follows."""
    n_layer = N_LAYER + predicts
    keys: dict[str, Any] = {
        **checks.shape(n_layer, D, HEADS, 1, RANK + ROT, F),
        **RMS,
        "attention.head_count_kv": [int(il in ATTENDS or il == N_LAYER) for il in range(n_layer)],
        "attention.key_length_mla": NOPE + ROT,
        "attention.value_length": RANK,
        "attention.value_length_mla": VALUE,
        "attention.kv_lora_rank": RANK,
        "rope.dimension_count": ROT,
        "rope.freq_base": BASE,
        "ssm.conv_kernel": TAPS,
        "kda.head_dim": SIZE,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": LOWER,
        "expert_count": N_EXPERT,
        "expert_used_count": USED,
        "expert_group_count": N_GROUP,
        "expert_group_used_count": USED_GROUPS,
        "expert_feed_forward_length": F_EXP,
        "expert_shared_feed_forward_length": F_SHARED,
        "expert_shared_count": 1,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": N_DENSE,
        **({"attention.q_lora_rank": Q_RANK} if low_rank else {}),
        **({"nextn_predict_layers": 1} if predicts else {}),
    }
    if is_limited:
        padding = [0.0] * predicts
        keys |= {"swiglu_clamp_exp": LIMITS + padding, "swiglu_clamp_shexp": SHARED_LIMITS + padding}
    m = RandomModel("bailingmoe3", seed, **keys)
    checks.frame(m, D, tied=False)
    for il in range(n_layer):
        add_layer(m, il, low_rank)
    if predicts:
        p = f"blk.{N_LAYER}"
        m.matrix(f"{p}.nextn.eh_proj", D, 2 * D)
        for name in ("nextn.enorm", "nextn.hnorm", "layer_output_norm"):
            m.norm(f"{p}.{name}", D)
    return m


def add_layer(m: RandomModel, il: int, low_rank: bool) -> None:
    p = f"blk.{il}"
    m.norm(f"{p}.attn_norm", D)
    m.norm(f"{p}.ffn_norm", D)
    if m.keys["attention.head_count_kv"][il]:
        add_attention(m, p, low_rank)
    else:
        add_recurrent(m, p)
    if il < N_DENSE:
        m.ffn(p, D, F)
        return
    checks.experts(m, p, D, F_EXP, N_EXPERT)
    m.vector(f"{p}.exp_probs_b.bias", N_EXPERT)
    m.ffn(p, D, F_SHARED, "_shexp")


def add_recurrent(m: RandomModel, p: str) -> None:
    for name in "qkv":
        m.matrix(f"{p}.attn_{name}", C, D)
        m.matrix(f"{p}.ssm_conv1d_{name}", C, 1, TAPS)
    m.matrix(f"{p}.ssm_f_a", C, D)
    m.matrix(f"{p}.ssm_g_a", C, D)
    m.vector(f"{p}.ssm_dt.bias", C)
    m.weights[f"{p}.ssm_a"] = m.random.uniform(0.5, 3, (HEADS, 1)).astype(np.float32)
    m.matrix(f"{p}.ssm_beta", HEADS, D)
    m.norm(f"{p}.ssm_norm", SIZE)
    m.matrix(f"{p}.attn_output", D, C)


def add_attention(m: RandomModel, p: str, low_rank: bool) -> None:
    if low_rank:
        m.matrix(f"{p}.attn_q_a", Q_RANK, D)
        m.norm(f"{p}.attn_q_a_norm", Q_RANK)
        m.matrix(f"{p}.attn_q_b", HEADS * (NOPE + ROT), Q_RANK)
    else:
        m.matrix(f"{p}.attn_q", HEADS * (NOPE + ROT), D)
    m.matrix(f"{p}.attn_kv_a_mqa", RANK + ROT, D)
    m.norm(f"{p}.attn_kv_a_norm", RANK)
    m.matrix(f"{p}.attn_k_b", HEADS, RANK, NOPE)
    m.matrix(f"{p}.attn_v_b", HEADS, VALUE, RANK)
    m.matrix(f"{p}.attn_gate", HEADS, D)
    m.matrix(f"{p}.attn_output", D, HEADS * VALUE)


def delta_layer(e: Evaluation, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a KDA layer for a normed input h [T, D]."""
    slots = np.zeros(len(h), int)

    def convolved(name: str) -> np.ndarray:
        past = np.zeros((1, C, TAPS - 1))
        taps = w[f"ssm_conv1d_{name}"].reshape(C, TAPS)
        x, _ = recurrent.causal_conv(h @ w[f"attn_{name}"].T, taps, past, slots, silu=True)
        return x.reshape(-1, HEADS, SIZE)

    q, k, v = (convolved(name) for name in "qkv")
    raw = (h @ w["ssm_f_a"].T + w["ssm_dt.bias"]).reshape(-1, HEADS, SIZE)
    decay = LOWER * ref.sigmoid(raw * w["ssm_a"].reshape(HEADS, 1))
    beta = ref.sigmoid(h @ w["ssm_beta"].T)
    state = np.zeros((1, HEADS, SIZE, SIZE))
    out, _ = recurrent.gated_delta_rule(
        q, k, v, decay, beta, state, slots, l2_eps=1e-6, scale=SIZE**-0.5, interleaved=False
    )
    gate = ref.sigmoid(h @ w["ssm_g_a"].T)
    return (ref.rms_norm(out, w["ssm_norm"], e.eps).reshape(len(h), C) * gate) @ w["attn_output"].T


def attention_layer(e: Evaluation, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a layer of gated latent attention for a normed input h [T, D]."""
    angles = ref.plain_angles(ROT, BASE, np.arange(len(h), dtype=np.float64))
    if "attn_q" in w:
        q = h @ w["attn_q"].T
    else:
        q = ref.rms_norm(h @ w["attn_q_a"].T, w["attn_q_a_norm"], e.eps) @ w["attn_q_b"].T
    q = q.reshape(len(h), HEADS, NOPE + ROT)
    q = np.concatenate([q[..., :NOPE], ref.rotate(q[..., NOPE:], angles, neox=False)], axis=2)
    latent, shared = np.split(h @ w["attn_kv_a_mqa"].T, [RANK], axis=1)
    latent = ref.rms_norm(latent, w["attn_kv_a_norm"], e.eps)
    shared = ref.rotate(shared[:, None], angles, neox=False)
    own = np.einsum("tr,hrn->thn", latent, w["attn_k_b"])
    v = np.einsum("tr,hnr->thn", latent, w["attn_v_b"])
    k = np.concatenate([own, np.repeat(shared, HEADS, 1)], axis=2)
    heads = ref.attend(q, k, v, 1 / math.sqrt(NOPE + ROT)).reshape(len(h), HEADS, VALUE)
    gated = heads * ref.sigmoid(h @ w["attn_gate"].T)[..., None]
    return gated.reshape(len(h), -1) @ w["attn_output"].T


def bounded_swiglu(w: ref.Weights, h: np.ndarray, suffix: str, limit: float) -> np.ndarray:
    """Network of weights [F, D] and [D, F] on h [T, D]; limit 0: none."""
    gate, up = ref.silu(h @ w[f"ffn_gate{suffix}"].T), h @ w[f"ffn_up{suffix}"].T
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (gate * up) @ w[f"ffn_down{suffix}"].T


def expert_weights(w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Weights [T, E] of the experts: the best of the groups whose two best experts sum highest."""
    scores = ref.sigmoid(h @ w["ffn_gate_inp"].T)
    choice = (scores + w["exp_probs_b.bias"]).reshape(len(h), N_GROUP, -1)
    of_groups = np.sort(choice, axis=2)[..., -2:].sum(-1)
    left_out = np.argsort(-of_groups, axis=1)[:, USED_GROUPS:]
    np.put_along_axis(choice, left_out[..., None], -np.inf, 1)
    kept = np.argsort(-choice.reshape(len(h), -1), axis=1)[:, :USED]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, kept, np.take_along_axis(scores, kept, 1), 1)
    return SCALE * weights / weights.sum(1, keepdims=True)


def experts(w: ref.Weights, h: np.ndarray, limit: float, shared_limit: float) -> np.ndarray:
    """Routed and shared experts on h [T, D]."""
    out, weights = bounded_swiglu(w, h, "_shexp", shared_limit), expert_weights(w, h)
    for expert in range(N_EXPERT):
        own = {name: values[expert] for name, values in w.items() if name.endswith("_exps")}
        out = out + weights[:, expert, None] * bounded_swiglu(own, h, "_exps", limit)
    return out


def layer(e: Evaluation, il: int, x: np.ndarray) -> np.ndarray:
    """The residual stream [T, D] behind a layer."""
    w = checks.layer_weights(e, il)
    limit, shared = (e.keys[f"swiglu_clamp_{part}"][il] if f"swiglu_clamp_{part}" in e.keys else 0.0 for part in ENDS)
    branch = attention_layer if "attn_kv_a_mqa" in w else delta_layer
    x = x + branch(e, w, ref.rms_norm(x, w["attn_norm"], e.eps))
    h = ref.rms_norm(x, w["ffn_norm"], e.eps)
    return x + (bounded_swiglu(w, h, "", shared) if il < N_DENSE else experts(w, h, limit, shared))


def evaluated(m: RandomModel, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits [T, V] in float64."""
    e = Evaluation(m)
    x = e.w["token_embd"][tokens]
    for il in range(N_LAYER):
        x = layer(e, il, x)
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def bailingmoe3() -> tuple[RandomModel, np.ndarray]:
    """Ling 3.0 Flash: queries of one matrix, bounded networks."""
    m = new_model(91, low_rank=False, is_limited=True)
    return m, evaluated(m)


def bailingmoe3_low_rank() -> tuple[RandomModel, np.ndarray]:
    """Ling 3.0 tiny; with a layer that predicts a further token."""
    m = new_model(92, low_rank=True, predicts=True)
    return m, evaluated(m)


MODELS = [bailingmoe3, bailingmoe3_low_rank]


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


def test_prediction_layer(tmp_path: Path) -> None:
    """Its norm has another name than those of other models."""
    m = bailingmoe3_low_rank()[0]
    model = Model.load(m.write(tmp_path / "model.gguf"))
    head = model.prediction_head()
    assert model.arch.is_recurrent and not head.arch.is_recurrent
    states = np.random.default_rng(1).standard_normal((len(TOKENS), D)).astype(np.float32)
    context = Context(head, ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"))
    found = context.decode(Batch.single(TOKENS, logits="all"), states)
    e = Evaluation(m)
    w = checks.layer_weights(e, N_LAYER)
    embedded = ref.rms_norm(e.w["token_embd"][TOKENS], w["nextn.enorm"], e.eps)
    both = np.concatenate([embedded, ref.rms_norm(states.astype(np.float64), w["nextn.hnorm"], e.eps)], axis=1)
    x = layer(e, N_LAYER, both @ w["nextn.eh_proj"].T)
    truth = ref.rms_norm(x, w["layer_output_norm"], e.eps) @ e.w["output"].T
    error = np.abs(found - truth).max(axis=1) / np.abs(truth).max()
    assert error.max() < 5e-5, f"position {error.argmax()} off by {error.max():.1e} relative"


@pytest.mark.parametrize("mla", [0, 1, 3])
def test_drafts_of_the_prediction_layer(mla: int, tmp_path: Path) -> None:
    """The text is that without drafts."""
    path = bailingmoe3_low_rank()[0].write(tmp_path / "model.gguf")
    drafting = SpeculativeParams(types=("mtp",), n_max=3, p_min=0.0)
    llms = [LLM(path, n_ctx=256, n_threads=1, mla=mla, speculative=params) for params in (None, drafting)]
    texts = [llm.generate([3, 5, 7], 40, temperature=0.0, ignore_eos=True) for llm in llms]
    assert texts[0] == texts[1]
    assert llms[1].speculator is not None and llms[1].speculator.n_drafted > 20


def test_groups_limit_without_an_option(tmp_path: Path) -> None:
    path, log = bailingmoe3()[0].write(tmp_path / "model.gguf"), list[str]()
    rows = []
    for grouped in (False, True):
        settings = ContextParams(n_ctx=64, n_threads=1, grouped_experts=grouped)
        rows.append(Context(Model.load(path), settings, log=log.append).decode(Batch.single(TOKENS)))
    np.testing.assert_array_equal(*rows)
    said = [line for line in log if "has no effect" in line]
    assert said == ["warning: -ger has no effect: the model's routing is limited to the best groups in any case"]


WRONG = {
    "kda.safe_gate false is not supported": ("kda.safe_gate", False),
    "kda.gate_lower_bound is 0, not below 0": ("kda.gate_lower_bound", 0.0),
    "2 of 5 expert groups used with 12 experts": ("expert_group_count", 5),
    "0 of 4 expert groups used with 12 experts": ("expert_group_used_count", 0),
    "swiglu_clamp_exp must hold 6 floats, one per layer": ("swiglu_clamp_exp", [0.0] * 5),
    "impossible KDA layers: head_dim 0, conv_kernel 4": ("kda.head_dim", 0),
    "tensor 'blk.0.attn_q.weight' has wrong shape": ("kda.head_dim", 16),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be(message: str, tmp_path: Path) -> None:
    model = bailingmoe3()[0]
    key, value = WRONG[message]
    model.keys[key] = value
    with pytest.raises(IkpyError, match=message) as error:
        Model.load(model.write(tmp_path / "model.gguf"))
    assert "\n" not in str(error.value)
