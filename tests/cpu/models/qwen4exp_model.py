"""Random models of Qwen4-Exp (qwen4exp) and their evaluation in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models import reference_sparse as sparse
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

BASE = 10000.0
LEAST = 1e-6
"""Of whose magnitude the root of a gate is taken."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model. attends: layers of attention, pools: those of them with an indexer.

    ngram_layer: None for none; ngram: tokens of the longest; per_length: heads of each length; rows: of the heads.
    """

    layers: int = 5
    attends: tuple[int, ...] = (1, 4)
    pools: tuple[int, ...] = (1, 4)
    d: int = 64
    heads: int = 4
    kv: int = 2
    head: int = 32
    rotated: int = 8
    key_heads: int = 2
    value_heads: int = 4
    dk: int = 32
    taps: int = 4
    experts: int = 8
    used: int = 3
    ff: int = 32
    index_heads: int = 4
    index_size: int = 32
    top_k: int = 8
    pool: int = 4
    streams: int = 4
    rank: int = 24
    ngram_layer: int | None = 0
    ngram: int = 3
    per_length: int = 2
    row: int = 16
    kernel: int = 4
    rows: tuple[int, ...] = (53, 59, 61, 67)
    eos: int = int(TOKENS[13])

    @property
    def n_keys(self) -> int:
        """Elements of all keys of a recurrent layer."""
        return self.key_heads * self.dk

    @property
    def n_values(self) -> int:
        """Elements of all its values."""
        return self.value_heads * self.dk

    @property
    def offsets(self) -> list[int]:
        """Where the rows of every head begin."""
        return [sum(self.rows[:i]) for i in range(len(self.rows))]


def random_model(n: Sizes, seed: int = 91) -> RandomModel:
    """A model as llama.cpp writes its files."""
    keys = {
        **checks.shape(n.layers, n.d, n.heads, n.kv, n.head, n.ff),
        **checks.RMS,
        "rope.dimension_count": n.rotated,
        "rope.dimension_sections": [n.rotated // 2 - 2, 1, 1, 0],
        "attention.recurrent_layers": [il not in n.attends for il in range(n.layers)],
        "ssm.conv_kernel": n.taps,
        "ssm.inner_size": n.n_values,
        "ssm.state_size": n.dk,
        "ssm.time_step_rank": n.value_heads,
        "ssm.group_count": n.key_heads,
        "expert_count": n.experts,
        "expert_used_count": n.used,
        "expert_feed_forward_length": n.ff,
        "expert_shared_feed_forward_length": n.ff,
        "hyper_connection.count": n.streams,
        "hyper_connection.low_rank": n.rank,
        "attention.indexer.head_count": n.index_heads,
        "attention.indexer.key_length": n.index_size,
        "attention.indexer.top_k": n.top_k,
        "attention.compress_ratios": [n.pool if il in n.pools else 0 for il in range(n.layers)],
    }
    m = RandomModel("qwen4exp", seed, **keys)
    checks.frame(m, n.d, tied=False)
    del m.weights["output_norm"]
    if n.ngram_layer is not None:
        _add_ngrams(m, n, n.ngram_layer)
    _add_mixer(m, "output_hc", n, last=True)
    for il in range(n.layers):
        p = f"blk.{il}"
        for branch in ("attn", "ffn"):
            _add_mixer(m, f"{p}.hc_{branch}", n)
        (_add_attention if il in n.attends else _add_recurrent)(m, p, n)
        checks.experts(m, p, n.d, n.ff, n.experts)
        m.ffn(p, n.d, n.ff, "_shexp")
        m.vector(f"{p}.ffn_gate_inp_shexp", n.d)
    return m


def _add_mixer(m: RandomModel, p: str, n: Sizes, *, last: bool = False) -> None:
    wide = n.streams * n.d
    m.norm(f"{p}_norm", wide)
    m.matrix(f"{p}_down", n.rank, wide)
    m.weights[f"{p}_down"] *= 3  # divided by the number of streams
    m.matrix(f"{p}_up", wide, n.rank)
    if not last:
        m.matrix(f"{p}_inject", n.streams, wide)
        m.weights[f"{p}_inject"] *= 3


def _add_ngrams(m: RandomModel, n: Sizes, il: int) -> None:
    wide, heads, p = n.streams * n.d, len(n.rows), f"blk.{il}"
    m.keys |= {
        "ple.layers": [il],
        "ple.ngram_size": n.ngram,
        "ple.heads_per_ngram": n.per_length,
        "ple.conv_kernel": n.kernel,
        "ple.eos_token_id": n.eos,
        "embedding_length_per_layer_input": n.row,
        "ple.layer_multipliers": m.random.integers(1 << 40, 1 << 45, n.ngram).astype(np.uint64) | np.uint64(1),
        "ple.head_vocab_sizes": np.array(n.rows, np.uint64),
        "ple.head_offsets": np.array(n.offsets, np.uint64),
    }
    m.weights["per_layer_token_embd"] = m.random.normal(0, 1, (sum(n.rows) + 3, n.row)).astype(np.float32)
    m.matrix(f"{p}.ple_key", wide, heads * n.row)
    m.matrix(f"{p}.ple_value", n.d, heads * n.row)
    for name in ("key", "query", "conv"):
        m.norm(f"{p}.ple_norm_{name}", wide)
    m.matrix(f"{p}.ple_conv1d", wide, n.kernel)


def _add_attention(m: RandomModel, p: str, n: Sizes) -> None:
    m.attention(p, n.d, n.heads, n.kv, n.head)
    m.matrix(f"{p}.attn_q", 2 * n.heads * n.head, n.d)
    for name in "qk":
        m.norm(f"{p}.attn_{name}_norm", n.head)
    m.matrix(f"{p}.indexer.q_proj", n.index_heads * n.index_size, n.d)
    m.matrix(f"{p}.indexer.k_proj", n.index_size, n.d)
    for name in "qk":
        m.norm(f"{p}.indexer.{name}_norm", n.index_size)


def _add_recurrent(m: RandomModel, p: str, n: Sizes) -> None:
    m.matrix(f"{p}.attn_qkv", 2 * n.n_keys + n.n_values, n.d)
    m.matrix(f"{p}.attn_gate", n.n_values, n.d)
    for name in ("beta", "alpha"):
        m.matrix(f"{p}.ssm_{name}", n.value_heads, n.d)
    m.matrix(f"{p}.ssm_conv1d", 2 * n.n_keys + n.n_values, n.taps)
    m.vector(f"{p}.ssm_dt.bias", n.value_heads)
    m.weights[f"{p}.ssm_a"] = -m.random.uniform(0.1, 2, n.value_heads).astype(np.float32)
    m.norm(f"{p}.ssm_norm", n.dk)
    m.matrix(f"{p}.ssm_out", n.d, n.n_values)


class Qwen4Exp(Evaluation):
    """The definition; one text from position 0 on. all_cells: indexers choose nothing."""

    def __init__(self, model: RandomModel, n: Sizes, *, all_cells: bool = False) -> None:
        super().__init__(model)
        self.n, self.all_cells, self.keys = n, all_cells, model.keys

    # residual streams

    def normed(self, streams: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Streams [T, n, D], each normed, times weights [n D]."""
        return ref.rms_norm(streams, weight.reshape(self.n.streams, -1), self.eps)

    def mixed(self, w: ref.Weights, p: str, streams: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The input [T, D] of a branch, and the shares [T, n] of its output."""
        normed, n = self.normed(streams, w[f"{p}_norm"]), self.n.streams
        flat = normed.reshape(len(streams), -1)
        gate = ref.sigmoid(ref.silu(flat @ w[f"{p}_down"].T / n) @ w[f"{p}_up"].T)
        mixed = (gate.reshape(normed.shape) * normed).mean(1)
        inject = w.get(f"{p}_inject")
        return mixed, None if inject is None else 2 * ref.sigmoid(flat @ inject.T / n)

    # n-grams

    def ngram_rows(self, tokens: np.ndarray) -> np.ndarray:
        """Rows [T, H] of the table: of what a token is and what was before it, back to the last end of a text."""
        n, factors = self.n, [int(m) for m in self.keys["ple.layer_multipliers"]]
        rows = []
        for t, token in enumerate(tokens.tolist()):
            past = tokens[max(0, t - n.ngram + 1) : t].tolist()
            if n.eos in past:
                past = past[len(past) - past[::-1].index(n.eos) :]
            gram = [token, *past[::-1], *[n.eos] * (n.ngram - 1 - len(past))]
            found = []
            for length in range(2, n.ngram + 1):
                mixed = 0
                for each, factor in zip(gram[:length], factors, strict=False):
                    mixed ^= each * factor
                heads = range((length - 2) * n.per_length, (length - 1) * n.per_length)
                found += [mixed % n.rows[h] + n.offsets[h] for h in heads]
            rows.append(found)
        return np.array(rows)

    def ngrams(self, w: ref.Weights, streams: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """What n-grams add to the streams [T, n, D]."""
        n, n_tokens = self.n, len(tokens)
        embedded = self.w["per_layer_token_embd"][self.ngram_rows(tokens)].reshape(n_tokens, -1)
        keys = self.normed((embedded @ w["ple_key"].T).reshape(streams.shape), w["ple_norm_key"])
        score = (keys * self.normed(streams, w["ple_norm_query"])).sum(-1) / math.sqrt(n.d)
        gate = ref.sigmoid(np.sign(score) * np.sqrt(np.maximum(np.abs(score), LEAST)))
        gated = gate[..., None] * (embedded @ w["ple_value"].T)[:, None]
        normed = self.normed(gated, w["ple_norm_conv"]).reshape(n_tokens, -1)
        mixed = np.zeros_like(normed)
        for t in range(n_tokens):
            for k in range(n.kernel):
                if (at := t - (n.kernel - 1 - k) * n.ngram) >= 0:
                    mixed[t] += w["ple_conv1d"][:, k] * normed[at]
        return gated + ref.silu(mixed).reshape(streams.shape)

    # branches

    def delta_layer(self, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """Branch of a recurrent layer for its input h [T, D]."""
        n, slots = self.n, np.zeros(len(h), int)
        past = np.zeros((1, 2 * n.n_keys + n.n_values, n.taps - 1))
        mixed, _ = recurrent.causal_conv(h @ w["attn_qkv"].T, w["ssm_conv1d"], past, slots, silu=True)
        q, k, v = np.split(mixed, [n.n_keys, 2 * n.n_keys], axis=1)
        decay = w["ssm_a"] * np.log1p(np.exp(h @ w["ssm_alpha"].T + w["ssm_dt.bias"]))
        out, _ = recurrent.gated_delta_rule(
            q.reshape(-1, n.key_heads, n.dk),
            k.reshape(-1, n.key_heads, n.dk),
            v.reshape(-1, n.value_heads, n.dk),
            decay,
            ref.sigmoid(h @ w["ssm_beta"].T),
            np.zeros((1, n.value_heads, n.dk, n.dk)),
            slots,
            l2_eps=1e-6,
            scale=n.dk**-0.5,
            interleaved=False,
        )
        normed = ref.rms_norm(out, w["ssm_norm"], self.eps).reshape(len(h), -1)
        return (normed * ref.sigmoid(h @ w["attn_gate"].T)) @ w["ssm_out"].T

    def rotated(self, x: np.ndarray, pos: np.ndarray) -> np.ndarray:
        """Heads [T, H, size] at positions [T]."""
        return ref.rotate(x, ref.plain_angles(self.n.rotated, BASE, pos), neox=True)

    def choose(self, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """bool [T, T]: the positions (columns) of the best pools and behind the last whole one, of each token (row)."""
        n, n_tokens = self.n, len(h)
        at = np.arange(n_tokens)
        q = (h @ w["indexer.q_proj"].T).reshape(n_tokens, n.index_heads, n.index_size)
        q = self.rotated(ref.rms_norm(q, w["indexer.q_norm"], self.eps), at.astype(np.float64))
        n_pools = n_tokens // n.pool
        raw = (h @ w["indexer.k_proj"].T)[: n_pools * n.pool].reshape(n_pools, n.pool, n.index_size)
        keys = ref.rms_norm(raw.mean(1), w["indexer.k_norm"], self.eps)
        keys = self.rotated(keys[:, None], n.pool * np.arange(n_pools, dtype=np.float64))[:, 0]
        ends = (np.arange(n_pools) + 1) * n.pool - 1
        scores = sparse.index_scores(q, np.ones((n_tokens, n.index_heads)), keys)
        pools = sparse.choose(scores, ends[None] <= at[:, None], n.top_k // n.pool)
        chosen = np.zeros((n_tokens, n_tokens), bool)
        chosen[:, : n_pools * n.pool] = np.repeat(pools, n.pool, axis=1)
        tail = (at + 1) // n.pool * n.pool
        return chosen | ((at[None] >= tail[:, None]) & (at[None] <= at[:, None]))

    def attention_layer(self, w: ref.Weights, h: np.ndarray, *, chooses: bool) -> np.ndarray:
        """Branch of a layer of gated attention for its input h [T, D]."""
        n, pos = self.n, np.arange(len(h), dtype=np.float64)
        q, gate = np.split((h @ w["attn_q"].T).reshape(-1, n.heads, 2 * n.head), 2, axis=2)
        k, v = ((h @ w[f"attn_{name}"].T).reshape(-1, n.kv, n.head) for name in "kv")
        q, k = ref.rms_norm(q, w["attn_q_norm"], self.eps), ref.rms_norm(k, w["attn_k_norm"], self.eps)
        chosen = self.choose(w, h) if chooses and not self.all_cells else None
        visible = None if chosen is None else (lambda i, j: chosen[i, j])
        attended = ref.attend(self.rotated(q, pos), self.rotated(k, pos), v, n.head**-0.5, visible=visible)
        return (attended.reshape(len(h), -1) * ref.sigmoid(gate.reshape(len(h), -1))) @ w["attn_output"].T

    def network(self, il: int, w: ref.Weights, h: np.ndarray) -> np.ndarray:
        """Routed experts and the gated shared one."""
        shares = checks.chosen(ref.softmax(h @ w["ffn_gate_inp"].T), self.n.used)
        shared = self.ffn(il, h, suffix="_shexp") * ref.sigmoid(h @ w["ffn_gate_inp_shexp"])[:, None]
        return checks.routed(w, h, shares / shares.sum(-1, keepdims=True), self.n.used) + shared

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [T, V] of a text."""
        n, tokens = self.n, np.asarray(tokens)
        streams = np.repeat(self.w["token_embd"][tokens][:, None], n.streams, axis=1)
        for il in range(n.layers):
            w = checks.layer_weights(self, il)
            if il == n.ngram_layer:
                streams = streams + self.ngrams(w, streams, tokens)
            for branch in ("attn", "ffn"):
                h, shares = self.mixed(w, f"hc_{branch}", streams)
                if branch == "ffn":
                    y = self.network(il, w, h)
                elif il in n.attends:
                    y = self.attention_layer(w, h, chooses=il in n.pools)
                else:
                    y = self.delta_layer(w, h)
                assert shares is not None
                streams = streams + shares[..., None] * y[:, None]
        return self.mixed(self.w, "output_hc", streams)[0] @ self.w["output"].T
