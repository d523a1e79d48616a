"""Random models with layers that predict further tokens, and these layers by their definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.cpu import definition_checks as checks
from tests.cpu import glm5_next_model as glm5
from tests.cpu import qwen4exp_model as qwen4
from tests.cpu import reference_models as ref
from tests.cpu import test_arch_mimo2 as mimo
from tests.cpu import test_arch_nemotron_h as nemotron
from tests.cpu.reference_models import N_VOCAB, Evaluation, RandomModel

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
    """What joins a token's embedding with a state, whose streams may have norms apart, and the norm behind the layer, if
    it has one.
    """
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
