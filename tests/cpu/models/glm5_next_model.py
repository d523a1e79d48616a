"""Random models of GLM-5.3 Flash (glm5-next) and their evaluation in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_hyper_connections as hyper
from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models import reference_sparse as sparse
from tests.cpu.models.reference_models import Evaluation, RandomModel

KEY_NORM_EPS = 1e-6
"""Of the LayerNorm of index keys: the files do not say it."""
SCALE, HC_EPS, ITERATIONS = 2.5, 1e-6, 20


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model. attends: layers of latent attention; full: those of them with an indexer of their own.

    bound: of decays, None for the softplus of Kimi Linear; limit: of gates and ups; pool: positions of an index key.
    """

    layers: int = 5
    attends: tuple[int, ...] = (1, 3, 4)
    full: tuple[int, ...] = (1, 4)
    d: int = 64
    heads: int = 3
    size: int = 32
    taps: int = 4
    nope: int = 32
    value: int = 32
    rank: int = 64
    q_rank: int = 64
    ff: int = 96
    dense: int = 1
    experts: int = 8
    used: int = 3
    ff_expert: int = 32
    index_heads: int = 16
    index_size: int = 32
    top_k: int = 12
    pool: int = 4
    streams: int = 4
    bound: float | None = -5.0
    limit: float = 0.6


def random_model(n: Sizes, seed: int = 81) -> RandomModel:
    """A model as llama.cpp writes its files."""
    kv = [int(il in n.attends) for il in range(n.layers)]
    keys = {
        **checks.shape(n.layers, n.d, n.heads, 1, n.rank, n.ff),
        **checks.RMS,
        "attention.head_count_kv": kv,
        "attention.key_length_mla": n.nope,
        "attention.value_length_mla": n.value,
        "attention.q_lora_rank": n.q_rank,
        "attention.kv_lora_rank": n.rank,
        "attention.indexer.head_count": n.index_heads,
        "attention.indexer.key_length": n.index_size,
        "attention.indexer.top_k": n.top_k,
        "attention.indexer.kpool": n.pool,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.types": [int(il in n.full) for il in range(n.layers)],
        "rope.dimension_count": 0,
        "ssm.conv_kernel": n.taps,
        "kda.head_dim": n.size,
        "expert_count": n.experts,
        "expert_used_count": n.used,
        "expert_feed_forward_length": n.ff_expert,
        "expert_shared_count": 1,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": n.dense,
        "swiglu_clamp_exp": [n.limit] * n.layers,
        "swiglu_clamp_shexp": [n.limit] * n.layers,
        "hyper_connection.count": n.streams,
        "hyper_connection.sinkhorn_iterations": ITERATIONS,
        "hyper_connection.epsilon": HC_EPS,
    }
    if n.bound is not None:
        keys["kda.gate_lower_bound"] = n.bound
    m = RandomModel("glm5-next", seed, **keys)
    checks.frame(m, n.d, tied=False)
    for il in range(n.layers):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", n.d)
        m.norm(f"{p}.ffn_norm", n.d)
        _add_streams(m, p, n)
        if il in n.attends:
            _add_attention(m, p, n)
        else:
            _add_recurrent(m, p, n)
        if il in n.full:
            _add_indexer(m, p, n)
        if il < n.dense:
            m.ffn(p, n.d, n.ff)
        else:
            checks.experts(m, p, n.d, n.ff_expert, n.experts)
            m.vector(f"{p}.exp_probs_b.bias", n.experts)
            m.ffn(p, n.d, n.ff_expert, "_shexp")
    return m


def _add_streams(m: RandomModel, p: str, n: Sizes) -> None:
    mixes = (2 + n.streams) * n.streams
    for branch in ("attn", "ffn"):
        m.matrix(f"{p}.hc_{branch}_fn", mixes, n.streams * n.d)
        m.vector(f"{p}.hc_{branch}_base", mixes)
        m.norm(f"{p}.hc_{branch}_scale", 3)


def _add_recurrent(m: RandomModel, p: str, n: Sizes) -> None:
    c = n.heads * n.size
    for name in "qkv":
        m.matrix(f"{p}.attn_{name}", c, n.d)
        m.matrix(f"{p}.ssm_conv1d_{name}", c, 1, n.taps)
    for name in "fg":
        m.matrix(f"{p}.ssm_{name}_a", n.size, n.d)
        m.matrix(f"{p}.ssm_{name}_b", c, n.size)
    m.vector(f"{p}.ssm_dt.bias", c)
    m.weights[f"{p}.ssm_a"] = -m.random.uniform(0.1, 2, n.heads).astype(np.float32)
    m.matrix(f"{p}.ssm_beta", n.heads, n.d)
    m.norm(f"{p}.ssm_norm", n.size)
    m.matrix(f"{p}.attn_output", n.d, c)


def _add_attention(m: RandomModel, p: str, n: Sizes) -> None:
    m.matrix(f"{p}.attn_q_a", n.q_rank, n.d)
    m.norm(f"{p}.attn_q_a_norm", n.q_rank)
    m.matrix(f"{p}.attn_q_b", n.heads * n.nope, n.q_rank)
    m.matrix(f"{p}.attn_kv_a_mqa", n.rank, n.d)
    m.norm(f"{p}.attn_kv_a_norm", n.rank)
    m.matrix(f"{p}.attn_k_b", n.heads, n.rank, n.nope)
    m.matrix(f"{p}.attn_v_b", n.heads, n.value, n.rank)
    m.matrix(f"{p}.attn_output", n.d, n.heads * n.value)


def _add_indexer(m: RandomModel, p: str, n: Sizes) -> None:
    m.matrix(f"{p}.indexer.attn_q_b", n.index_heads * n.index_size, n.q_rank)
    m.matrix(f"{p}.indexer.attn_k", n.index_size, n.d)
    m.norm(f"{p}.indexer.k_norm", n.index_size)
    m.vector(f"{p}.indexer.k_norm.bias", n.index_size)
    m.matrix(f"{p}.indexer.proj", n.index_heads, n.d)
    m.matrix(f"{p}.indexer_compressor_gate", n.index_size, n.d)
    m.vector(f"{p}.indexer_compressor_ape", n.pool, n.index_size)


class Glm5Next(Evaluation):
    """The definition; one text from position 0 on. all_cells: indexers choose nothing."""

    def __init__(self, model: RandomModel, n: Sizes, *, all_cells: bool = False) -> None:
        super().__init__(model)
        self.n, self.all_cells = n, all_cells
        self.chosen: np.ndarray | None = None

    def delta_layer(self, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """Branch of a KDA layer for a normed input h [T, D]."""
        n = self.n
        slots = np.zeros(len(h), int)

        def convolved(name: str) -> np.ndarray:
            taps = w[f"ssm_conv1d_{name}"].reshape(-1, n.taps)
            past = np.zeros((1, len(taps), n.taps - 1))
            x, _ = recurrent.causal_conv(h @ w[f"attn_{name}"].T, taps, past, slots, silu=True)
            return x.reshape(-1, n.heads, n.size)

        q, k, v = (convolved(name) for name in "qkv")
        step = (h @ w["ssm_f_a"].T @ w["ssm_f_b"].T + w["ssm_dt.bias"]).reshape(-1, n.heads, n.size)
        rate = -w["ssm_a"].reshape(n.heads, 1)
        decay = -rate * np.log1p(np.exp(step)) if n.bound is None else n.bound * ref.sigmoid(rate * step)
        state = np.zeros((1, n.heads, n.size, n.size))
        out, _ = recurrent.gated_delta_rule(
            q,
            k,
            v,
            decay,
            ref.sigmoid(h @ w["ssm_beta"].T),
            state,
            slots,
            l2_eps=1e-6,
            scale=n.size**-0.5,
            interleaved=False,
        )
        gate = ref.sigmoid(h @ w["ssm_g_a"].T @ w["ssm_g_b"].T)
        return (ref.rms_norm(out, w["ssm_norm"], self.eps).reshape(len(h), -1) * gate) @ w["attn_output"].T

    def choose(self, w: ref.Weights, h: np.ndarray, latent: np.ndarray) -> np.ndarray:
        """bool [T, T]: the positions (columns) of the best pools and behind the last whole one, of each token (row)."""
        n, n_tokens = self.n, len(h)
        q = (latent @ w["indexer.attn_q_b"].T).reshape(n_tokens, n.index_heads, n.index_size)
        k = ref.layer_norm(h @ w["indexer.attn_k"].T, w["indexer.k_norm"], KEY_NORM_EPS) + w["indexer.k_norm.bias"]
        gate = h @ w["indexer_compressor_gate"].T
        n_pools = n_tokens // n.pool
        keys = np.zeros((n_pools, n.index_size))
        for i in range(n_pools):
            part = slice(i * n.pool, (i + 1) * n.pool)
            shares = hyper.softmax(gate[part] + w["indexer_compressor_ape"], axis=0)
            keys[i] = (shares * k[part]).sum(0)
        ends = (np.arange(n_pools) + 1) * n.pool - 1
        at = np.arange(n_tokens)
        scores = sparse.index_scores(q, h @ w["indexer.proj"].T, keys)
        pools = sparse.choose(scores, ends[None] <= at[:, None], n.top_k // n.pool)
        chosen = np.zeros((n_tokens, n_tokens), bool)
        chosen[:, : n_pools * n.pool] = np.repeat(pools, n.pool, axis=1)
        tail = (at + 1) // n.pool * n.pool
        return chosen | ((at[None] >= tail[:, None]) & (at[None] <= at[:, None]))

    def attention_layer(self, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """Branch of a layer of latent attention for a normed input h [T, D]."""
        n = self.n
        q_latent = ref.rms_norm(h @ w["attn_q_a"].T, w["attn_q_a_norm"], self.eps)
        if "indexer.attn_k" in w and not self.all_cells:
            self.chosen = self.choose(w, h, q_latent)
        chosen = self.chosen
        q = (q_latent @ w["attn_q_b"].T).reshape(len(h), n.heads, n.nope)
        latent = ref.rms_norm(h @ w["attn_kv_a_mqa"].T, w["attn_kv_a_norm"], self.eps)
        k = np.einsum("tr,hrn->thn", latent, w["attn_k_b"])
        v = np.einsum("tr,hnr->thn", latent, w["attn_v_b"])
        visible = None if chosen is None else (lambda i, j: chosen[i, j])
        return ref.attend(q, k, v, 1 / math.sqrt(n.nope), visible=visible) @ w["attn_output"].T

    def limited(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """SwiGLU with bounds of both."""
        return ref.silu(np.minimum(gate, self.n.limit)) * np.clip(up, -self.n.limit, self.n.limit)

    def network(self, w: ref.Weights, h: np.ndarray, suffix: str = "") -> np.ndarray:
        """Dense or shared network."""
        gate, up, down = (w[f"ffn_{name}{suffix}"] for name in ("gate", "up", "down"))
        return self.limited(h @ gate.T, h @ up.T) @ down.T

    def experts(self, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """Routed experts and the shared one."""
        shares = checks.chosen(ref.sigmoid(h @ w["ffn_gate_inp"].T), self.n.used, w["exp_probs_b.bias"])
        shares *= SCALE / shares.sum(-1, keepdims=True)
        out = self.network(w, h, "_shexp")
        for t, row in enumerate(h):
            for e in np.flatnonzero(shares[t]):
                hidden = self.limited(w["ffn_gate_exps"][e] @ row, w["ffn_up_exps"][e] @ row)
                out[t] += shares[t, e] * (w["ffn_down_exps"][e] @ hidden)
        return out

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [T, V] of a text."""
        n = self.n
        streams = np.repeat(self.w["token_embd"][tokens][:, None], n.streams, axis=1)
        for il in range(n.layers):
            w = checks.layer_weights(self, il)
            for branch in ("attn", "ffn"):
                flat = ref.rms_norm(streams.reshape(len(tokens), -1), 1.0, self.eps)
                base, scale = w[f"hc_{branch}_base"], w[f"hc_{branch}_scale"]
                mixed = hyper.weights(flat @ w[f"hc_{branch}_fn"].T, base, scale, n.streams, ITERATIONS, HC_EPS)
                h = ref.rms_norm(hyper.collapse(streams, mixed), w[f"{branch}_norm"], self.eps)
                if branch == "attn":
                    y = (self.attention_layer if il in n.attends else self.delta_layer)(w, h)
                else:
                    y = self.network(w, h) if il < n.dense else self.experts(w, h)
                streams = hyper.expand(streams, y, mixed)
        return ref.rms_norm(streams.mean(1), self.w["output_norm"], self.eps) @ self.w["output"].T
