"""A random model of LLaMA's kind and drafters of EAGLE-3's kind for it, by their definitions in float64."""

from __future__ import annotations

import math

import numpy as np

from ikpy.quants import registry
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

D, OWN, HEADS, KV, HEAD, FF, LAYERS = 64, 96, 4, 2, 32, 96, 5
READ = (1, 2, 4)
KNOWN = 50
"""Tokens that a drafter with a vocabulary of its own knows."""


def target() -> RandomModel:
    """The model."""
    m = RandomModel("llama", 71, **checks.shape(LAYERS, D, HEADS, KV, HEAD, FF), **checks.RMS)
    m.keys["rope.dimension_count"] = HEAD
    m.numbered_words = True
    checks.frame(m, D, tied=False)
    for il in range(LAYERS):
        p = f"blk.{il}"
        for name in ("attn_norm", "ffn_norm"):
            m.norm(f"{p}.{name}", D)
        m.attention(p, D, HEADS, KV, HEAD)
        m.ffn(p, D, FF)
    return m


def drafter(*, own: bool, norms_residual: bool = False) -> RandomModel:
    """own: whether it has a width, an embedding and an output matrix of its own, the latter of some tokens only."""
    d = OWN if own else D
    m = RandomModel("eagle3", 72, **checks.shape(1, d, HEADS, KV, HEAD, FF), **checks.RMS)
    m.keys |= {"rope.dimension_count": HEAD, "target_layers": list(READ), "target_hidden_size": D}
    m.numbered_words = True
    if norms_residual:
        m.keys["norm_before_residual"] = True
    m.matrix("fc", d, len(READ) * D)
    m.norm("output_norm", d)
    if own:
        m.matrix("token_embd", N_VOCAB, d)
        m.matrix("output", KNOWN, d)
        tokens = np.sort(m.random.permutation(N_VOCAB)[:KNOWN]).astype(np.int64)
        m.weights["d2t"], m.bare = tokens, ("d2t",)
        m.encoded["d2t"] = registry.by_name("i64").id, tokens.view(np.uint8)
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        m.norm(f"blk.0.{name}", d)
    for name, n in (("q", HEADS), ("k", KV), ("v", KV)):
        m.matrix(f"blk.0.attn_{name}", n * HEAD, 2 * d)
    m.matrix("blk.0.attn_output", d, HEADS * HEAD)
    m.ffn("blk.0", d, FF)
    return m


def inputs_of_layers(m: RandomModel, tokens: np.ndarray) -> np.ndarray:
    """What the layers of READ read, side by side [T, 3 * D]."""
    e, found = Evaluation(m), []
    x = e.w["token_embd"][tokens]
    angles = ref.plain_angles(HEAD, 10000.0, np.arange(len(tokens), dtype=np.float64))
    for il in range(LAYERS):
        if il in READ:
            found.append(x)
        q, k, v = e.qkv(il, ref.rms_norm(x, e.w[f"blk.{il}.attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=False) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + e.ffn(il, ref.rms_norm(x, e.w[f"blk.{il}.ffn_norm"], e.eps))
    return np.concatenate(found, axis=1)


def layer(m: RandomModel, of: RandomModel, tokens: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, rows of the output matrix] and states [T, W] of tokens [T] and the states [T, W] before them."""
    e, w = Evaluation(m), {**{n: a.astype(np.float64) for n, a in of.weights.items()}, **Evaluation(m).w}
    token = ref.rms_norm(w["token_embd"][tokens], w["blk.0.attn_norm"], e.eps)
    state = ref.rms_norm(states, w["blk.0.attn_norm_2"], e.eps)
    x = state if m.keys.get("norm_before_residual") else states
    angles = ref.plain_angles(HEAD, 10000.0, np.arange(len(tokens), dtype=np.float64))
    q, k, v = e.qkv(0, np.concatenate([token, state], axis=1))
    q, k = (ref.rotate(t, angles, neox=False) for t in (q, k))
    x = x + e.output(0, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
    x = x + e.ffn(0, ref.rms_norm(x, w["blk.0.ffn_norm"], e.eps))
    return ref.rms_norm(x, w["output_norm"], e.eps) @ w["output"].T, x
