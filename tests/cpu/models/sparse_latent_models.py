"""Random models with latent attention and an indexer (glm-dsa, deepseek32) and their evaluation in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

RMS_EPS = 1e-5
KEY_NORM_EPS = 1e-6
"""Of the LayerNorm of index keys: the files do not say it."""
SCALE = 2.5
Rounding = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model; ``predict`` of the layers predict further tokens."""

    layers: int = 3
    predict: int = 0
    d: int = 64
    heads: int = 3
    nope: int = 24
    rot: int = 16
    value: int = 20
    rank: int = 48
    q_rank: int = 40
    ff: int = 40
    dense: int = 1
    experts: int = 6
    used: int = 2
    index_heads: int = 4
    index_size: int = 32
    top_k: int = 2048
    n_ctx: int = 512


PUBLISHED = Sizes(
    layers=4,
    predict=1,
    d=96,
    heads=4,
    nope=192,
    rot=64,
    value=256,
    rank=512,
    q_rank=96,
    ff=64,
    index_heads=8,
    index_size=128,
)
"""Head sizes of GLM-5, which other engines insist on."""


def random_model(n: Sizes, arch: str, *, seed: int = 51, full: list[int] | None = None) -> RandomModel:
    """A model whose files keep one KV head, attn_k_b and attn_v_b. full: layers with an indexer of their own; all if
    None, and the file does not say which.
    """
    keys = {
        "block_count": n.layers,
        "embedding_length": n.d,
        "feed_forward_length": n.ff,
        "attention.head_count": n.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": n.rank + n.rot,
        "attention.value_length": n.rank,
        "attention.key_length_mla": n.nope + n.rot,
        "attention.value_length_mla": n.value,
        "attention.q_lora_rank": n.q_rank,
        "attention.kv_lora_rank": n.rank,
        "attention.layer_norm_rms_epsilon": RMS_EPS,
        "attention.indexer.head_count": n.index_heads,
        "attention.indexer.key_length": n.index_size,
        "attention.indexer.top_k": n.top_k,
        "rope.dimension_count": n.rot,
        "rope.freq_base": 10000.0,
        "context_length": n.n_ctx,
        "leading_dense_block_count": n.dense,
        "expert_count": n.experts,
        "expert_used_count": n.used,
        "expert_feed_forward_length": n.ff,
        "expert_shared_count": 1,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    if n.predict:
        keys["nextn_predict_layers"] = n.predict
    runs = n.layers - n.predict
    if full is not None:
        keys["attention.indexer.types"] = [int(il in full) for il in range(runs)]
    m = RandomModel(arch, seed, **keys)
    m.matrix("token_embd", N_VOCAB, n.d)
    m.norm("output_norm", n.d)
    m.matrix("output", N_VOCAB, n.d)
    for il in range(n.layers):
        _latent_attention(m, f"blk.{il}", n)
        if full is None or il in full or il >= runs:
            _indexer(m, f"blk.{il}", n)
        _ffn(m, il, n)
    for il in range(runs, n.layers):
        m.matrix(f"blk.{il}.nextn.eh_proj", n.d, 2 * n.d)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            m.norm(f"blk.{il}.nextn.{name}", n.d)
    return m


def _latent_attention(m: RandomModel, p: str, n: Sizes) -> None:
    for name, size in (("attn_norm", n.d), ("ffn_norm", n.d), ("attn_q_a_norm", n.q_rank), ("attn_kv_a_norm", n.rank)):
        m.norm(f"{p}.{name}", size)
    m.matrix(f"{p}.attn_q_a", n.q_rank, n.d)
    m.matrix(f"{p}.attn_q_b", n.heads * (n.nope + n.rot), n.q_rank)
    m.matrix(f"{p}.attn_kv_a_mqa", n.rank + n.rot, n.d)
    m.matrix(f"{p}.attn_k_b", n.heads, n.rank, n.nope)
    m.weights[f"{p}.attn_k_b"] *= math.sqrt(n.nope / n.rank)  # keys of unit variance
    m.matrix(f"{p}.attn_v_b", n.heads, n.value, n.rank)
    m.matrix(f"{p}.attn_output", n.d, n.heads * n.value)


def _indexer(m: RandomModel, p: str, n: Sizes) -> None:
    m.matrix(f"{p}.indexer.attn_q_b", n.index_heads * n.index_size, n.q_rank)
    m.matrix(f"{p}.indexer.attn_k", n.index_size, n.d)
    m.norm(f"{p}.indexer.k_norm", n.index_size)
    m.vector(f"{p}.indexer.k_norm.bias", n.index_size)
    m.matrix(f"{p}.indexer.proj", n.index_heads, n.d)


def _ffn(m: RandomModel, il: int, n: Sizes) -> None:
    p = f"blk.{il}"
    if il < n.dense:
        m.ffn(p, n.d, n.ff)
        return
    m.matrix(f"{p}.ffn_gate_inp", n.experts, n.d)
    m.vector(f"{p}.exp_probs_b.bias", n.experts)
    for name, rows, columns in (("gate", n.ff, n.d), ("up", n.ff, n.d), ("down", n.d, n.ff)):
        m.matrix(f"{p}.ffn_{name}_exps", n.experts, rows, columns)
    m.ffn(p, n.d, n.ff, "_shexp")


class SparseLatent(Evaluation):
    """The definition. Of index scores, only their order counts: the positive factors of DeepSeek-V3.2 are left out.

    top_k: cells that a token attends to, the first ones where scores are equal; None: all. cached: rounding of cached
    index keys.
    """

    def __init__(
        self, model: RandomModel, n: Sizes, *, top_k: int | None = None, cached: Rounding = lambda keys: keys
    ) -> None:
        super().__init__(model)
        self.n, self.top_k, self.cached = n, top_k, cached
        self.neox = model.arch != "glm-dsa"
        self.chosen: np.ndarray | None = None
        """bool [T, T]: which positions (columns) the last indexer chose for a token (row)."""

    def of_layer(self, il: int) -> ref.Weights:
        """Weights of a layer by their name in it."""
        prefix = f"blk.{il}."
        return {name.removeprefix(prefix): w for name, w in self.w.items() if name.startswith(prefix)}

    def choose(self, w: ref.Weights, h: np.ndarray, q_latent: np.ndarray, angles: np.ndarray) -> None:
        """The top_k visible positions of every token by their index scores."""
        n, top_k = self.n, self.top_k
        assert top_k is not None
        q = (q_latent @ w["indexer.attn_q_b"].T).reshape(len(h), n.index_heads, n.index_size)
        k = ref.layer_norm(h @ w["indexer.attn_k"].T, w["indexer.k_norm"], KEY_NORM_EPS) + w["indexer.k_norm.bias"]
        q = ref.rotate(q, angles, neox=self.neox)
        k = self.cached(ref.rotate(k[:, None], angles, neox=self.neox)[:, 0])
        head_scores = np.maximum(np.einsum("thd,sd->ths", q, k), 0)
        scores = np.einsum("ths,th->ts", head_scores, h @ w["indexer.proj"].T)
        self.chosen = np.zeros(scores.shape, bool)
        for t, row in enumerate(scores):
            self.chosen[t, np.argsort(-row[: t + 1], kind="stable")[:top_k]] = True

    def attention(self, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """[T, heads * value] before the output projection."""
        n = self.n
        angles = ref.plain_angles(n.rot, 10000.0, np.arange(len(h), dtype=np.float64))
        q_latent = ref.rms_norm(h @ w["attn_q_a"].T, w["attn_q_a_norm"], self.eps)
        if self.top_k is not None and "indexer.attn_k" in w:
            self.choose(w, h, q_latent, angles)
        q = (q_latent @ w["attn_q_b"].T).reshape(len(h), n.heads, n.nope + n.rot)
        latent, rotated = np.split(h @ w["attn_kv_a_mqa"].T, [n.rank], axis=1)
        latent = ref.rms_norm(latent, w["attn_kv_a_norm"], self.eps)
        k = np.einsum("tr,hrn->thn", latent, w["attn_k_b"])
        v = np.einsum("tr,hvr->thv", latent, w["attn_v_b"])
        k_rotated = np.repeat(ref.rotate(rotated[:, None], angles, neox=False), n.heads, axis=1)
        q = np.concatenate([q[..., : n.nope], ref.rotate(q[..., n.nope :], angles, neox=False)], axis=2)
        chosen = self.chosen
        visible = None if chosen is None else (lambda i, j: chosen[i, j])
        k = np.concatenate([k, k_rotated], axis=2)
        return ref.attend(q, k, v, 1 / math.sqrt(n.nope + n.rot), visible=visible)

    def experts(self, w: ref.Weights, il: int, h: np.ndarray) -> np.ndarray:
        """Routed and shared experts."""
        out = self.ffn(il, h, suffix="_shexp")
        for t, row in enumerate(h):
            p = ref.sigmoid(w["ffn_gate_inp"] @ row)
            chosen = np.argsort(-(p + w["exp_probs_b.bias"]))[: self.n.used]
            for c in chosen:
                hidden = ref.silu(w["ffn_gate_exps"][c] @ row) * (w["ffn_up_exps"][c] @ row)
                out[t] += SCALE * p[c] / p[chosen].sum() * (w["ffn_down_exps"][c] @ hidden)
        return out

    def layer(self, il: int, x: np.ndarray) -> np.ndarray:
        """The residual stream [T, d] behind a layer."""
        w = self.of_layer(il)
        x = x + self.output(il, self.attention(w, ref.rms_norm(x, w["attn_norm"], self.eps)))
        h = ref.rms_norm(x, w["ffn_norm"], self.eps)
        return x + (self.ffn(il, h) if il < self.n.dense else self.experts(w, il, h))

    def states(self, tokens: np.ndarray) -> np.ndarray:
        """Normed hidden states [T, d] of a text."""
        x = self.w["token_embd"][tokens]
        for il in range(self.n.layers - self.n.predict):
            x = self.layer(il, x)
        return ref.rms_norm(x, self.w["output_norm"], self.eps)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [T, n_vocab] of a text."""
        return self.states(tokens) @ self.w["output"].T

    def prediction(self, tokens: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Logits of the prediction layer: tokens [T] with the hidden states [T, d] behind the tokens before them."""
        il = self.n.layers - 1
        w = self.of_layer(il)
        parts = (
            ref.rms_norm(self.w["token_embd"][tokens], w["nextn.enorm"], self.eps),
            ref.rms_norm(states, w["nextn.hnorm"], self.eps),
        )
        x = self.layer(il, np.concatenate(parts, axis=1) @ w["nextn.eh_proj"].T)
        return ref.rms_norm(x, w["nextn.shared_head_norm"], self.eps) @ self.w["output"].T
