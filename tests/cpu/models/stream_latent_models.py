"""Random models of Tencent Hy4 (hy_v4) and their evaluation in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.cpu.models import reference_hyper_connections as streams
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.sparse_latent_models import SCALE, Rounding, Sizes, SparseLatent, random_model

BASE = 1e7


@dataclass(frozen=True)
class StreamSizes(Sizes):
    """n_streams: residual streams; limit: bound of SwiGLU's two factors in experts, 0: none."""

    n_streams: int = 3
    magnitude: float = 1.8
    epsilon: float = 1e-3
    limit: float = 0.6
    index_heads: int = 8


SMALL = StreamSizes(layers=4)
FULL = (0, 1, 3)
"""Layers with an indexer of their own; layer 2 takes the choice of layer 1."""


def hy_v4(n: StreamSizes = SMALL, *, indexers: bool = True) -> RandomModel:
    """A dense layer, then experts. Without indexers every layer attends to everything."""
    m = random_model(n, "hy_v4", seed=99, full=list(FULL))
    m.numbered_words = True
    m.keys |= {
        "rope.freq_base": BASE,
        "hyper_connection.count": n.n_streams,
        "hyper_connection.epsilon": n.epsilon,
        "hyper_connection.magnitude": n.magnitude,
        "swiglu_clamp_exp": [n.limit] * n.layers,
        "attention.indexer.types": [il in FULL for il in range(n.layers)],
    }
    if not indexers:
        m.keys = {name: value for name, value in m.keys.items() if ".indexer." not in name}
        m.weights = {name: w for name, w in m.weights.items() if ".indexer." not in name}
    m.matrix("output_hc_fn", n.n_streams, n.n_streams * n.d)
    m.vector("output_hc_base", n.n_streams)
    m.norm("output_hc_scale", 1)
    for il in range(n.layers):
        p = f"blk.{il}"
        m.vector(f"{p}.attn_sinks", n.heads)
        m.matrix(f"{p}.attn_gate", n.heads * n.value, n.d)
        for branch in ("attn", "ffn"):
            m.matrix(f"{p}.hc_{branch}_fn", 2 * n.n_streams, n.n_streams * n.d)
            m.vector(f"{p}.hc_{branch}_base", 2 * n.n_streams)
            m.norm(f"{p}.hc_{branch}_scale", 2)
    return m


class IndependentStreams(SparseLatent):
    """The definition. The last elements of a head are rotated in pairs of neighbours, those of indexers too."""

    n: StreamSizes

    def __init__(
        self, model: RandomModel, n: StreamSizes, *, top_k: int | None = None, cached: Rounding = lambda keys: keys
    ) -> None:
        super().__init__(model, n, top_k=top_k, cached=cached)

    def choose(self, w: ref.Weights, h: np.ndarray, q_latent: np.ndarray, angles: np.ndarray) -> None:
        n = self.n
        q = (q_latent @ w["indexer.attn_q_b"].T).reshape(len(h), n.index_heads, n.index_size)
        k = ref.layer_norm(h @ w["indexer.attn_k"].T, w["indexer.k_norm"], self.eps) + w["indexer.k_norm.bias"]
        q, k = self._rotated(q, angles), self.cached(self._rotated(k[:, None], angles)[:, 0])
        head_scores = np.maximum(np.einsum("thd,sd->ths", q, k), 0)
        scores = np.einsum("ths,th->ts", head_scores, h @ w["indexer.proj"].T)
        self.chosen = np.zeros(scores.shape, bool)
        for t, row in enumerate(scores):
            self.chosen[t, np.argsort(-row[: t + 1], kind="stable")[: self.top_k]] = True

    def _rotated(self, x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """x [T, H, n] with its last elements rotated."""
        first, last = np.split(x, [x.shape[2] - self.n.rot], axis=2)
        return np.concatenate([first, ref.rotate(last, angles, neox=False)], axis=2)

    def attention(self, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        n = self.n
        angles = ref.plain_angles(n.rot, BASE, np.arange(len(h), dtype=np.float64))
        q_latent = ref.rms_norm(h @ w["attn_q_a"].T, w["attn_q_a_norm"], self.eps)
        if self.top_k is not None and "indexer.attn_k" in w:
            self.choose(w, h, q_latent, angles)
        q = self._rotated((q_latent @ w["attn_q_b"].T).reshape(len(h), n.heads, n.nope + n.rot), angles)
        latent, shared = np.split(h @ w["attn_kv_a_mqa"].T, [n.rank], axis=1)
        latent = ref.rms_norm(latent, w["attn_kv_a_norm"], self.eps)
        k = np.einsum("tr,hrn->thn", latent, w["attn_k_b"])
        v = np.einsum("tr,hvr->thv", latent, w["attn_v_b"])
        shared = np.repeat(self._rotated(shared[:, None], angles), n.heads, axis=1)
        chosen = self.chosen
        visible = None if chosen is None else (lambda i, j: chosen[i, j])
        k = np.concatenate([k, shared], axis=2)
        scale = 1 / math.sqrt(n.nope + n.rot)
        attended = ref.attend(q, k, v, scale, visible=visible, sinks=w["attn_sinks"])
        return attended * ref.sigmoid(h @ w["attn_gate"].T)

    def experts(self, w: ref.Weights, il: int, h: np.ndarray) -> np.ndarray:
        out, limit = self.ffn(il, h, suffix="_shexp"), self.n.limit or np.inf
        for t, row in enumerate(h):
            p = ref.sigmoid(w["ffn_gate_inp"] @ row)
            chosen = np.argsort(-(p + w["exp_probs_b.bias"]))[: self.n.used]
            for c in chosen:
                gate, up = (w[f"ffn_{name}_exps"][c] @ row for name in ("gate", "up"))
                hidden = ref.silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)
                out[t] += SCALE * p[c] / p[chosen].sum() * (w["ffn_down_exps"][c] @ hidden)
        return out

    def weights(self, prefix: str, x: np.ndarray) -> np.ndarray:
        """Weights of the streams x [T, n, d] at a branch, or behind the last layer."""
        n, mix = self.n, ref.rms_norm(x.reshape(len(x), -1), 1.0, self.eps) @ self.w[f"{prefix}_fn"].T
        base, scale = self.w[f"{prefix}_base"], self.w[f"{prefix}_scale"]
        return streams.weights(mix, base, scale, n.n_streams, 0, n.epsilon, n.magnitude)

    def layer(self, il: int, x: np.ndarray) -> np.ndarray:
        """The residual streams [T, n, d] behind a layer."""
        w = self.of_layer(il)
        back = self.weights(f"blk.{il}.hc_attn", x)
        h = ref.rms_norm(streams.collapse(x, back), w["attn_norm"], self.eps)
        x = streams.expand(x, self.output(il, self.attention(w, h)), back)
        back = self.weights(f"blk.{il}.hc_ffn", x)
        h = ref.rms_norm(streams.collapse(x, back), w["ffn_norm"], self.eps)
        return streams.expand(x, self.ffn(il, h) if il < self.n.dense else self.experts(w, il, h), back)

    def states(self, tokens: np.ndarray) -> np.ndarray:
        x = np.repeat(self.w["token_embd"][tokens][:, None], self.n.n_streams, axis=1)
        self.chosen = None
        for il in range(self.n.layers):
            x = self.layer(il, x)
        return ref.rms_norm(streams.collapse(x, self.weights("output_hc", x)), self.w["output_norm"], self.eps)
