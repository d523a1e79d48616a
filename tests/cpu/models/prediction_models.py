"""Random models with layers that predict further tokens, and these layers by their definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import glm5_next_model as glm5
from tests.cpu.models import qwen4exp_model as qwen4
from tests.cpu.models import reference_hyper_connections as hyper
from tests.cpu.models import reference_models as ref
from tests.cpu.models import test_arch_mimo2 as mimo
from tests.cpu.models import test_arch_nemotron_h as nemotron
from tests.cpu.models.reference_models import Evaluation, RandomModel

Heads = Callable[[int, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass
class Predicting:
    """A model and its heads: (number, tokens [n], states [n, W] behind the tokens before them) -> logits [n, V] and
    states [n, W] that a further head reads.
    """

    model: RandomModel
    n_layer: int
    heads: Heads


def add_inputs(
    m: RandomModel, il: int, d: int, *, norm: str = "nextn.shared_head_norm", streams: tuple[int, ...] = ()
) -> None:
    """What joins a token's embedding with a state, whose streams may have norms apart; the norm behind the layer."""
    m.matrix(f"blk.{il}.nextn.eh_proj", d, 2 * d)
    for name in ("nextn.enorm", *([norm] if norm else [])):
        m.norm(f"blk.{il}.{name}", d)
    m.norm(f"blk.{il}.nextn.hnorm", *streams, d)


def joined(e: Evaluation, w: ref.Weights, tokens: np.ndarray, states: np.ndarray) -> np.ndarray:
    """[n, D], or [n, streams, D] of states [n, streams, D]."""
    token = ref.rms_norm(e.w["token_embd"][tokens], w["nextn.enorm"], e.eps)
    state = ref.rms_norm(states, w["nextn.hnorm"], e.eps)
    if states.ndim == 3:
        token = np.repeat(token[:, None], states.shape[1], axis=1)
    return np.concatenate([token, state], axis=-1) @ w["nextn.eh_proj"].T


# MiMo-V2


def mimo2(n_predict: int = 2) -> Predicting:
    """Layers behind the others, with a window, sinks and a fused matrix; each is fed states before its norm."""
    model, _ = mimo.mimo2(0.707)
    n, kv = mimo.N, 2
    model.keys |= {
        "block_count": n + n_predict,
        "nextn_predict_layers": n_predict,
        "attention.head_count": [mimo.HEADS] * (n + n_predict),
        "attention.head_count_kv": mimo.KV_HEADS + [kv] * n_predict,
        "attention.sliding_window_pattern": mimo.IS_WINDOW + [True] * n_predict,
    }
    for il in range(n, n + n_predict):
        p = f"blk.{il}"
        add_inputs(model, il, mimo.D, norm="layer_output_norm" if il == n else "nextn.shared_head_norm")
        for name in ("attn_norm", "ffn_norm"):
            model.norm(f"{p}.{name}", mimo.D)
        model.matrix(f"{p}.attn_qkv", (mimo.HEADS + kv) * mimo.HEAD_K + kv * mimo.HEAD_V, mimo.D)
        model.matrix(f"{p}.attn_output", mimo.D, mimo.HEADS * mimo.HEAD_V)
        model.vector(f"{p}.attn_sinks", mimo.HEADS)
        model.ffn(p, mimo.D, mimo.F_DENSE)

    def heads(number: int, tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e, il = Evaluation(model), n + number
        w = checks.layer_weights(e, il)
        x = joined(e, w, tokens, states)
        sizes = np.cumsum([mimo.HEADS * mimo.HEAD_K, kv * mimo.HEAD_K])
        qkv = np.split(ref.rms_norm(x, w["attn_norm"], e.eps) @ w["attn_qkv"].T, sizes, axis=1)
        q, k, v = (t.reshape(len(x), -1, size) for t, size in zip(qkv, (192, 192, 128), strict=True))
        angles = ref.plain_angles(mimo.N_ROT, mimo.WINDOW_BASE, np.arange(len(x), dtype=np.float64))
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        inside = lambda i, j: i - j < mimo.WINDOW  # noqa: E731
        a = ref.attend(q, k, v, 1 / math.sqrt(mimo.HEAD_K), visible=inside, sinks=w["attn_sinks"])
        x = x + 0.707 * e.output(il, a)
        x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
        norm = w["layer_output_norm"] if number == 0 else w["nextn.shared_head_norm"]
        return ref.rms_norm(x, norm, e.eps) @ e.w["output"].T, x

    return Predicting(model, n, heads)


# Qwen4-Exp


def qwen4exp(*, pools: bool = True, n: qwen4.Sizes | None = None) -> Predicting:
    """A layer of attention, with an indexer that chooses pools if ``pools``, that reads all residual streams."""
    n = n or qwen4.Sizes()
    il = n.layers
    model = qwen4.random_model(n)
    p = f"blk.{il}"
    model.keys |= {"block_count": il + 1, "nextn_predict_layers": 1}
    model.keys["attention.compress_ratios"] = [*model.keys["attention.compress_ratios"], n.pool if pools else 0]
    model.keys["attention.recurrent_layers"] = [*model.keys["attention.recurrent_layers"], False]
    for branch in ("attn", "ffn"):
        qwen4._add_mixer(model, f"{p}.hc_{branch}", n)
    qwen4._add_attention(model, p, n)
    checks.experts(model, p, n.d, n.ff, n.experts)
    model.ffn(p, n.d, n.ff, "_shexp")
    model.vector(f"{p}.ffn_gate_inp_shexp", n.d)
    add_inputs(model, il, n.d, norm="", streams=(n.streams,))
    qwen4._add_mixer(model, f"{p}.nextn.hc_head", n, last=True)

    def heads(number: int, tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = qwen4.Qwen4Exp(model, n)
        w = checks.layer_weights(e, il)
        streams = joined(e, w, tokens, states.reshape(len(tokens), n.streams, n.d))
        for branch in ("attn", "ffn"):
            h, shares = e.mixed(w, f"hc_{branch}", streams)
            assert shares is not None
            y = e.network(il, w, h) if branch == "ffn" else e.attention_layer(w, h, chooses=pools)
            streams = streams + shares[..., None] * y[:, None]
        return e.mixed(w, "nextn.hc_head", streams)[0] @ e.w["output"].T, streams.reshape(len(tokens), -1)

    return Predicting(model, il, heads)


# GLM-5.3 Flash


def glm5_next(n: glm5.Sizes | None = None) -> Predicting:
    """A layer of sparse latent attention and experts with one residual stream."""
    n = n or glm5.Sizes()
    il = n.layers
    model = glm5.random_model(n)
    p = f"blk.{il}"
    model.keys |= {"block_count": il + 1, "nextn_predict_layers": 1}
    for key, value in (("attention.head_count_kv", 1), ("swiglu_clamp_exp", n.limit), ("swiglu_clamp_shexp", n.limit)):
        model.keys[key] = [*model.keys[key], value]
    for name in ("attn_norm", "ffn_norm"):
        model.norm(f"{p}.{name}", n.d)
    glm5._add_attention(model, p, n)
    glm5._add_indexer(model, p, n)
    checks.experts(model, p, n.d, n.ff_expert, n.experts)
    model.vector(f"{p}.exp_probs_b.bias", n.experts)
    model.ffn(p, n.d, n.ff_expert, "_shexp")
    add_inputs(model, il, n.d)

    def heads(number: int, tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = glm5.Glm5Next(model, n)
        w = checks.layer_weights(e, il)
        x = joined(e, w, tokens, states)
        x = x + e.attention_layer(w, ref.rms_norm(x, w["attn_norm"], e.eps))
        x = x + e.experts(w, ref.rms_norm(x, w["ffn_norm"], e.eps))
        y = ref.rms_norm(x, w["nextn.shared_head_norm"], e.eps)
        return y @ e.w["output"].T, y

    return Predicting(model, il, heads)


# Nemotron 3


def nemotron_h_moe(latent: int = 0) -> Predicting:
    """Attention and experts, latent ones if ``latent``, in one layer; the norm behind it takes the mean off."""
    pattern, epsilon = "MEM*EM*", 0.02
    model = nemotron.new_model(93, pattern, latent=latent, n_predict=1)
    il = len(pattern)
    p = f"blk.{il}"
    model.keys["attention.layer_norm_epsilon"] = epsilon
    model.norm(f"{p}.post_attention_norm", nemotron.D)
    nemotron.add_experts(model, p, latent)
    add_inputs(model, il, nemotron.D)

    def heads(number: int, tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = Evaluation(model)
        w = checks.layer_weights(e, il)
        x = joined(e, w, tokens, states)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(nemotron.HEAD)))
        x = x + nemotron.experts_branch(w, ref.rms_norm(x, w["post_attention_norm"], e.eps))
        y = ref.layer_norm(x, w["nextn.shared_head_norm"], epsilon)
        return y @ e.w["output"].T, y

    return Predicting(model, il, heads)


# DeepSeek V4


@dataclass(frozen=True)
class V4:
    """Dimensions of a model; ratios: positions per compressed cell of the layers, of which the last predicts."""

    ratios: tuple[int, ...] = (0, 4, 0)
    d: int = 64
    heads: int = 4
    size: int = 32
    rotated: int = 16
    q_rank: int = 32
    groups: int = 2
    out_rank: int = 32
    experts: int = 8
    used: int = 3
    ff: int = 32
    window: int = 9
    index_heads: int = 16
    index_size: int = 64
    streams: int = 4
    limit: float = 1.0

    @property
    def width(self) -> int:
        """Elements that a group of heads gives."""
        return self.heads * self.size // self.groups


BASE, SCALE, HC_EPS, ITERATIONS = 10000.0, 1.5, 1e-6, 20


def deepseek4(n: V4 | None = None, *, counted: bool = True) -> Predicting:
    """A layer with a window that reads all residual streams. counted: whether the file counts it among the layers."""
    n = n or V4()
    il = len(n.ratios) - 1
    listed = n.ratios if counted else n.ratios[:-1]
    keys: dict[str, Any] = {
        **checks.shape(len(listed), n.d, n.heads, 1, n.size, n.ff),
        **checks.RMS,
        "nextn_predict_layers": 1,
        "rope.dimension_count": n.rotated,
        "rope.freq_base": BASE,
        "expert_count": n.experts,
        "expert_used_count": n.used,
        "expert_feed_forward_length": n.ff,
        "expert_shared_count": 1,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "attention.q_lora_rank": n.q_rank,
        "attention.output_lora_rank": n.out_rank,
        "attention.output_group_count": n.groups,
        "attention.sliding_window": n.window,
        "attention.compress_ratios": list(listed),
        "attention.compress_rope_freq_base": 4 * BASE,
        "attention.indexer.head_count": n.index_heads,
        "attention.indexer.key_length": n.index_size,
        "attention.indexer.top_k": 4,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": [n.limit] * len(listed),
        "hyper_connection.count": n.streams,
        "hyper_connection.sinkhorn_iterations": ITERATIONS,
        "hyper_connection.epsilon": HC_EPS,
    }
    m = RandomModel("deepseek4", 97, **keys)
    checks.frame(m, n.d, tied=False)
    _add_connection(m, "output_hc", n.streams, 1, n)
    for layer, ratio in enumerate(n.ratios):
        _add_v4_layer(m, f"blk.{layer}", ratio, n)
    add_inputs(m, il, n.d)
    return Predicting(m, il, lambda number, tokens, states: _v4_head(m, n, tokens, states))


def _add_connection(m: RandomModel, p: str, mixes: int, scales: int, n: V4) -> None:
    m.matrix(f"{p}_fn", mixes, n.streams * n.d)
    m.vector(f"{p}_base", mixes)
    m.norm(f"{p}_scale", scales)


def _add_v4_layer(m: RandomModel, p: str, ratio: int, n: V4) -> None:
    for branch in ("attn", "ffn"):
        m.norm(f"{p}.{branch}_norm", n.d)
        _add_connection(m, f"{p}.hc_{branch}", (2 + n.streams) * n.streams, 3, n)
    m.matrix(f"{p}.attn_q_a", n.q_rank, n.d)
    m.norm(f"{p}.attn_q_a_norm", n.q_rank)
    m.matrix(f"{p}.attn_q_b", n.heads * n.size, n.q_rank)
    m.matrix(f"{p}.attn_kv", n.size, n.d)
    m.norm(f"{p}.attn_kv_a_norm", n.size)
    m.vector(f"{p}.attn_sinks", n.heads)
    m.matrix(f"{p}.attn_output_a", n.groups * n.out_rank, n.width)
    m.matrix(f"{p}.attn_output_b", n.d, n.groups * n.out_rank)
    for name, size in (("attn", n.size), ("indexer", n.index_size)) if ratio else ():
        m.matrix(f"{p}.{name}_compressor_kv", 2 * size, n.d)
        m.matrix(f"{p}.{name}_compressor_gate", 2 * size, n.d)
        m.vector(f"{p}.{name}_compressor_ape", ratio, 2 * size)
        m.norm(f"{p}.{name}_compressor_norm", size)
    if ratio:
        m.matrix(f"{p}.indexer.attn_q_b", n.index_heads * n.index_size, n.q_rank)
        m.matrix(f"{p}.indexer.proj", n.index_heads, n.d)
    checks.experts(m, p, n.d, n.ff, n.experts)
    m.vector(f"{p}.exp_probs_b.bias", n.experts)
    m.ffn(p, n.d, n.ff, "_shexp")


def _v4_head(m: RandomModel, n: V4, tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    e = Evaluation(m)
    w = checks.layer_weights(e, len(n.ratios) - 1)
    streams = joined(e, w, tokens, states.reshape(len(tokens), n.streams, n.d))
    for branch in ("attn", "ffn"):
        mixed = _v4_weights(e, w, f"hc_{branch}", streams, n)
        h = ref.rms_norm(hyper.collapse(streams, mixed), w[f"{branch}_norm"], e.eps)
        y = _v4_attention(e, w, h, n) if branch == "attn" else _v4_experts(w, h, n)
        streams = hyper.expand(streams, y, mixed)
    x = hyper.collapse(streams, _v4_weights(e, e.w, "output_hc", streams, n))
    logits = ref.rms_norm(x, w["nextn.shared_head_norm"], e.eps) @ e.w["output"].T
    return logits, streams.reshape(len(tokens), -1)


def _v4_weights(e: Evaluation, w: ref.Weights, p: str, streams: np.ndarray, n: V4) -> np.ndarray:
    mix = ref.rms_norm(streams.reshape(len(streams), -1), 1.0, e.eps) @ w[f"{p}_fn"].T
    return hyper.weights(mix, w[f"{p}_base"], w[f"{p}_scale"], n.streams, ITERATIONS, HC_EPS)


def _v4_attention(e: Evaluation, w: ref.Weights, h: np.ndarray, n: V4) -> np.ndarray:
    angles = ref.plain_angles(n.rotated, BASE, np.arange(len(h), dtype=np.float64))
    first = n.size - n.rotated

    def rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        return np.concatenate([x[..., :first], ref.rotate(x[..., first:], angles, neox=False)], axis=-1)

    latent = ref.rms_norm(h @ w["attn_q_a"].T, w["attn_q_a_norm"], e.eps)
    q = ref.rms_norm((latent @ w["attn_q_b"].T).reshape(len(h), n.heads, n.size), 1.0, e.eps)
    kv = ref.rms_norm(h @ w["attn_kv"].T, w["attn_kv_a_norm"], e.eps)[:, None]
    q, kv = rotated(q, angles), rotated(kv, angles)
    attended = ref.attend(q, kv, kv, n.size**-0.5, visible=lambda i, j: i - j < n.window, sinks=w["attn_sinks"])
    grouped = rotated(attended.reshape(len(h), n.heads, n.size), -angles).reshape(len(h), n.groups, n.width)
    low = np.einsum("tgw,grw->tgr", grouped, w["attn_output_a"].reshape(n.groups, n.out_rank, n.width))
    return low.reshape(len(h), -1) @ w["attn_output_b"].T


def _v4_experts(w: ref.Weights, h: np.ndarray, n: V4) -> np.ndarray:
    def bounded(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return ref.silu(np.minimum(gate, n.limit)) * np.clip(up, -n.limit, n.limit)

    scores = np.sqrt(np.log1p(np.exp(h @ w["ffn_gate_inp"].T)))
    shares = checks.chosen(scores, n.used, w["exp_probs_b.bias"])
    shares = SCALE * shares / shares.sum(-1, keepdims=True)
    gate, up = (np.einsum("efd,td->tef", w[f"ffn_{name}_exps"], h) for name in ("gate", "up"))
    out = np.einsum("te,edf,tef->td", shares, w["ffn_down_exps"], bounded(gate, up))
    return out + bounded(h @ w["ffn_gate_shexp"].T, h @ w["ffn_up_shexp"].T) @ w["ffn_down_shexp"].T


MODELS: dict[str, Callable[[], Predicting]] = {
    "mimo2": mimo2,
    "qwen4exp": qwen4exp,
    "qwen4exp without a choice": lambda: qwen4exp(pools=False),
    "glm5-next": glm5_next,
    "nemotron_h_moe": nemotron_h_moe,
    "nemotron_h_moe with latent experts": lambda: nemotron_h_moe(nemotron.LATENT),
    "deepseek4": deepseek4,
    "deepseek4 counted apart": lambda: deepseek4(counted=False),
}
