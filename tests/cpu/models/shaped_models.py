"""Random models of any dimensions with a float64 evaluation, for the architectures that differ most.

Every builder takes the dimensions as keywords and returns the model and its logits on ``tokens(n_vocab)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import Evaluation, RandomModel

RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
N_TOKENS = 40
TEMPERATURE_LENGTH = 9
Built = tuple[RandomModel, np.ndarray]


def tokens(n_vocab: int) -> np.ndarray:
    """The token ids [N_TOKENS] that models with this vocabulary are evaluated on."""
    return np.random.default_rng(n_vocab).integers(0, n_vocab, N_TOKENS)


@dataclass(frozen=True)
class Dims:
    """Dimensions of a model; ``experts`` 0: dense."""

    layers: int = 2
    d: int = 64
    heads: int = 4
    kv: int = 2
    head: int = 16
    ff: int = 56
    vocab: int = 160
    experts: int = 0
    used: int = 0
    window: int = 7
    rank: int = 64
    rot: int = 32
    dense: int = 0
    value: int = 0  # elements of a value head, 0: as many as of a key head

    @property
    def keys(self) -> dict[str, int]:
        """Metadata that every architecture has."""
        return {
            "vocab_size": self.vocab,
            "block_count": self.layers,
            "embedding_length": self.d,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv,
            "attention.key_length": self.head,
            "attention.value_length": self.value or self.head,
            "rope.dimension_count": self.head,
            "feed_forward_length": self.ff,
        }

    @property
    def expert_keys(self) -> dict[str, int]:
        """Metadata of the experts."""
        return {
            "expert_count": self.experts,
            "expert_used_count": self.used,
            "expert_feed_forward_length": self.ff,
        }


def _frame(m: RandomModel, n: Dims, *, tied: bool = False) -> None:
    m.matrix("token_embd", n.vocab, n.d)
    m.norm("output_norm", n.d)
    if not tied:
        m.matrix("output", n.vocab, n.d)


def _experts(m: RandomModel, p: str, n: Dims) -> None:
    m.matrix(f"{p}.ffn_gate_inp", n.experts, n.d)
    for name, rows, columns in (("gate", n.ff, n.d), ("up", n.ff, n.d), ("down", n.d, n.ff)):
        m.matrix(f"{p}.ffn_{name}_exps", n.experts, rows, columns)


def _layers(m: RandomModel, n: Dims, *norms: tuple[str, int]) -> None:
    for il in range(n.layers):
        for name, size in norms:
            m.norm(f"blk.{il}.{name}", size)
        m.attention(f"blk.{il}", n.d, n.heads, n.kv, n.head)


def _routed(
    w: ref.Weights, h: np.ndarray, used: int, weigh: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Weighted sum of SwiGLU experts; weigh(router logits) -> selection scores and unnormalised weights."""
    out = np.zeros((len(h), w["ffn_down_exps"].shape[1]))
    for t, row in enumerate(h):
        scores, weights = weigh(w["ffn_gate_inp"] @ row)
        chosen = np.argsort(-scores)[:used]
        for c in chosen:
            hidden = ref.silu(w["ffn_gate_exps"][c] @ row) * (w["ffn_up_exps"][c] @ row)
            out[t] += weights[c] / weights[chosen].sum() * (w["ffn_down_exps"][c] @ hidden)
    return out


def _of_layer(e: Evaluation, il: int) -> ref.Weights:
    return {name.removeprefix(f"blk.{il}."): w for name, w in e.w.items() if name.startswith(f"blk.{il}.")}


def llama(n: Dims) -> Built:
    """Grouped heads, NORM pairs."""
    m = RandomModel("llama", 21, **n.keys, **RMS)
    _frame(m, n)
    _layers(m, n, ("attn_norm", n.d), ("ffn_norm", n.d))
    value = n.value or n.head
    for il in range(n.layers):
        m.matrix(f"blk.{il}.attn_v", n.kv * value, n.d)
        m.matrix(f"blk.{il}.attn_output", n.d, n.heads * value)
        m.ffn(f"blk.{il}", n.d, n.ff)
    e = Evaluation(m)
    x = e.w["token_embd"][tokens(n.vocab)]
    angles = ref.plain_angles(n.head, 10000.0, np.arange(N_TOKENS))
    for il in range(n.layers):
        h = ref.rms_norm(x, e.w[f"blk.{il}.attn_norm"], e.eps)
        q, k = e.heads(f"blk.{il}.attn_q", h), e.heads(f"blk.{il}.attn_k", h)
        v = (h @ e.w[f"blk.{il}.attn_v"].T).reshape(N_TOKENS, n.kv, value)
        q, k = (ref.rotate(t, angles, neox=False) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(n.head)))
        x = x + e.ffn(il, ref.rms_norm(x, e.w[f"blk.{il}.ffn_norm"], e.eps))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def qwen3moe(n: Dims) -> Built:
    """Head norms, NEOX pairs, experts by softmax, weights renormalised."""
    m = RandomModel("qwen3moe", 22, **n.keys, **n.expert_keys, **RMS)
    _frame(m, n)
    _layers(m, n, ("attn_norm", n.d), ("ffn_norm", n.d), ("attn_q_norm", n.head), ("attn_k_norm", n.head))
    for il in range(n.layers):
        _experts(m, f"blk.{il}", n)
    e = Evaluation(m)
    x = e.w["token_embd"][tokens(n.vocab)]
    angles = ref.plain_angles(n.head, 10000.0, np.arange(N_TOKENS))
    for il in range(n.layers):
        w = _of_layer(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q = ref.rotate(ref.rms_norm(q, w["attn_q_norm"], e.eps), angles, neox=True)
        k = ref.rotate(ref.rms_norm(k, w["attn_k_norm"], e.eps), angles, neox=True)
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(n.head)))
        x = x + _routed(w, ref.rms_norm(x, w["ffn_norm"], e.eps), n.used, lambda z: (z, ref.softmax(z)))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def gemma3(n: Dims) -> Built:
    """Windows on five of six layers with their own RoPE base, norms behind the branches, tied output."""
    names = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    keys = {"attention.sliding_window": n.window, "rope.freq_base": 1e6}
    m = RandomModel("gemma3", 23, **n.keys, **RMS, **keys)
    _frame(m, n, tied=True)
    _layers(m, n, *((name, n.d) for name in names), ("attn_q_norm", n.head), ("attn_k_norm", n.head))
    for il in range(n.layers):
        m.ffn(f"blk.{il}", n.d, n.ff)
    e = Evaluation(m)
    x = e.w["token_embd"][tokens(n.vocab)] * math.sqrt(n.d)
    for il in range(n.layers):
        w = _of_layer(e, il)
        full = (il + 1) % 6 == 0
        angles = ref.plain_angles(n.head, 1e6 if full else 10000.0, np.arange(N_TOKENS))
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q = ref.rotate(ref.rms_norm(q, w["attn_q_norm"], e.eps), angles, neox=True)
        k = ref.rotate(ref.rms_norm(k, w["attn_k_norm"], e.eps), angles, neox=True)
        window = None if full else (lambda i, j: i - j < n.window)
        a = e.output(il, ref.attend(q, k, v, 1 / math.sqrt(n.head), visible=window))
        x = x + ref.rms_norm(a, w["post_attention_norm"], e.eps)
        y = e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps), ref.gelu)
        x = x + ref.rms_norm(y, w["post_ffw_norm"], e.eps)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T


def deepseek2(n: Dims, arch: str = "deepseek2", temperature: float = 0.0) -> Built:
    """Latent attention without a low-rank query; sigmoid routing with a selection bias, and a shared expert.

    temperature: factor of the logarithm by which queries grow every TEMPERATURE_LENGTH positions.
    """
    dn, dv = n.head, n.head
    keys = {
        **n.keys,
        **n.expert_keys,
        "attention.head_count_kv": n.heads,
        "attention.key_length": dn + n.rot,
        "attention.value_length": dv,
        "rope.dimension_count": n.rot,
        "attention.kv_lora_rank": n.rank,
        "attention.q_lora_rank": 0,
        "leading_dense_block_count": n.dense,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    if temperature:
        keys |= {"attention.temperature_scale": temperature, "rope.scaling.original_context_length": TEMPERATURE_LENGTH}
    m = RandomModel(arch, 24, **keys, **RMS)
    _frame(m, n)
    for il in range(n.layers):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", n.d)
        m.norm(f"{p}.ffn_norm", n.d)
        m.matrix(f"{p}.attn_q", n.heads * (dn + n.rot), n.d)
        m.matrix(f"{p}.attn_kv_a_mqa", n.rank + n.rot, n.d)
        m.norm(f"{p}.attn_kv_a_norm", n.rank)
        m.matrix(f"{p}.attn_kv_b", n.heads * (dn + dv), n.rank)
        m.matrix(f"{p}.attn_output", n.d, n.heads * dv)
        if il < n.dense:
            m.ffn(p, n.d, n.ff)
        else:
            _experts(m, p, n)
            m.vector(f"{p}.exp_probs_b.bias", n.experts)
            m.ffn(p, n.d, n.ff, "_shexp")
    e = Evaluation(m)
    x = e.w["token_embd"][tokens(n.vocab)]
    angles = ref.plain_angles(n.rot, 10000.0, np.arange(N_TOKENS))
    for il in range(n.layers):
        w = _of_layer(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        q = (h @ w["attn_q"].T).reshape(N_TOKENS, n.heads, dn + n.rot)
        latent, rotated = np.split(h @ w["attn_kv_a_mqa"].T, [n.rank], axis=1)
        kv = ref.rms_norm(latent, w["attn_kv_a_norm"], e.eps) @ w["attn_kv_b"].T
        k, v = np.split(kv.reshape(N_TOKENS, n.heads, dn + dv), [dn], axis=2)
        k_rot = np.repeat(ref.rotate(rotated[:, None], angles, neox=False), n.heads, axis=1)
        q = np.concatenate([q[..., :dn], ref.rotate(q[..., dn:], angles, neox=False)], axis=2)
        q *= 1 + temperature * np.log(1 + np.arange(N_TOKENS) // TEMPERATURE_LENGTH)[:, None, None]
        x = x + e.output(il, ref.attend(q, np.concatenate([k, k_rot], axis=2), v, 1 / math.sqrt(dn + n.rot)))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        if il < n.dense:
            x = x + e.ffn(il, h)
        else:
            bias = w["exp_probs_b.bias"]
            routed = _routed(w, h, n.used, lambda z, bias=bias: (ref.sigmoid(z) + bias, ref.sigmoid(z)))
            x = x + 1.5 * routed + e.ffn(il, h, suffix="_shexp")
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def mistral4(n: Dims) -> Built:
    """deepseek2 whose queries grow with the position."""
    return deepseek2(n, "mistral4", 0.3)


def gpt_oss(n: Dims) -> Built:
    """Sinks, windows on even layers, biased experts, separate gate and up."""
    m = RandomModel("gpt-oss", 25, **n.keys, **n.expert_keys, **RMS, **{"attention.sliding_window": n.window})
    _frame(m, n)
    _layers(m, n, ("attn_norm", n.d), ("post_attention_norm", n.d))
    for il in range(n.layers):
        p = f"blk.{il}"
        for name, width in (("q", n.heads * n.head), ("k", n.kv * n.head), ("v", n.kv * n.head), ("output", n.d)):
            m.vector(f"{p}.attn_{name}.bias", width)
        m.vector(f"{p}.attn_sinks", n.heads)
        _experts(m, p, n)
        m.vector(f"{p}.ffn_gate_inp.bias", n.experts)
        for name, width in (("gate", n.ff), ("up", n.ff), ("down", n.d)):
            m.vector(f"{p}.ffn_{name}_exps.bias", n.experts, width)
    e = Evaluation(m)
    x = e.w["token_embd"][tokens(n.vocab)]
    angles = ref.plain_angles(n.head, 10000.0, np.arange(N_TOKENS))
    for il in range(n.layers):
        w = _of_layer(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        window = (lambda i, j: i - j < n.window) if il % 2 == 0 else None
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(n.head), visible=window, sinks=w["attn_sinks"]))
        x = x + _oai_experts(w, ref.rms_norm(x, w["post_attention_norm"], e.eps), n.used)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def _oai_experts(w: ref.Weights, h: np.ndarray, used: int) -> np.ndarray:
    out = np.zeros_like(h)
    for t, row in enumerate(h):
        scores = w["ffn_gate_inp"] @ row + w["ffn_gate_inp.bias"]
        chosen = np.argsort(-scores)[:used]
        for c, weight in zip(chosen, ref.softmax(scores[chosen]), strict=True):
            gate, up = (w[f"ffn_{name}_exps"][c] @ row + w[f"ffn_{name}_exps.bias"][c] for name in ("gate", "up"))
            out[t] += weight * (w["ffn_down_exps"][c] @ ref.swiglu_oai(gate, up) + w["ffn_down_exps.bias"][c])
    return out
