"""Random models of T5's kind, and their definition in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel
from tests.cpu.models.test_encoders import WORDS

HEADS, HEAD, D, F, N_LAYER, EPS = 3, 32, 64, 160, 3, 1e-6
N_BUCKETS = 32
TOKENS = np.random.default_rng(31).integers(4, N_VOCAB, 37)


def new_t5(
    arch: str,
    seed: int,
    *,
    gated: bool = True,
    own_biases: bool = False,
    n_decoder: int = 0,
    tied: bool = False,
    **keys: Any,
) -> RandomModel:
    """own_biases: of every layer (UMT5); n_decoder: layers of the decoder."""
    usual = {
        "block_count": N_LAYER,
        "embedding_length": D,
        "attention.head_count": HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "feed_forward_length": F,
        "attention.layer_norm_rms_epsilon": EPS,
        "attention.layer_norm_epsilon": EPS,
        "attention.relative_buckets_count": N_BUCKETS,
    }
    m = RandomModel(arch, seed, **usual | keys)
    m.words = WORDS
    m.matrix("token_embd", N_VOCAB, D)
    _stack(m, "enc", N_LAYER, gated=gated, own_biases=own_biases)
    if n_decoder:
        _stack(m, "dec", n_decoder, gated=gated, own_biases=own_biases)
    if n_decoder and not tied:
        m.matrix("output", N_VOCAB, D)
    return m


def _stack(m: RandomModel, stack: str, n_layer: int, *, gated: bool, own_biases: bool) -> None:
    n_k, n_v = m.keys["attention.key_length"], m.keys["attention.value_length"]
    m.norm(f"{stack}.output_norm", D)
    for il in range(n_layer):
        p = f"{stack}.blk.{il}"
        for name in ("attn", "cross_attn") if stack == "dec" else ("attn",):
            m.norm(f"{p}.{name}_norm", D)
            for x in "qkv":
                m.matrix(f"{p}.{name}_{x}", HEADS * (n_v if x == "v" else n_k), D)
            m.weights[f"{p}.{name}_q"] /= 3  # scores are not divided by the root of the head size
            m.matrix(f"{p}.{name}_o", D, HEADS * n_v)
        if own_biases or il == 0:
            m.vector(f"{p}.attn_rel_b", m.keys["attention.relative_buckets_count"], HEADS)
            m.weights[f"{p}.attn_rel_b"] *= 3
        m.norm(f"{p}.ffn_norm", D)
        for name in ("gate", "up") if gated else ("up",):
            m.matrix(f"{p}.ffn_{name}", F, D)
        m.matrix(f"{p}.ffn_down", D, F)


def bucket(difference: int, n: int, *, both_ways: bool) -> int:
    """Of the position of a key less that of a query, as the publication numbers them."""
    first = 0
    if both_ways:
        n //= 2
        first = n if difference > 0 else 0
        distance = abs(difference)
    else:
        distance = max(0, -difference)
    if distance < n // 2:
        return first + distance
    grown = math.log(distance / (n // 2)) / math.log(128 / (n // 2)) * (n - n // 2)
    return first + min(n // 2 + int(grown + 1e-6), n - 1)


def biases(table: np.ndarray, n: int, *, both_ways: bool) -> np.ndarray:
    """Of a table [buckets, H] for a text of n tokens: [H, n, n]."""
    numbers = [[bucket(j - i, len(table), both_ways=both_ways) for j in range(n)] for i in range(n)]
    return table[np.array(numbers)].transpose(2, 0, 1)


def attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | float, *, causal: bool = False
) -> np.ndarray:
    """Rows of heads [T, H, d], keys and values of as many heads; [T, H * d]."""
    scores = np.einsum("thd,shd->hts", q, k) + bias
    if causal:
        scores = np.where(np.arange(len(k)) > np.arange(len(q))[:, None], -np.inf, scores)
    return np.einsum("hts,shd->thd", ref.softmax(scores), v).reshape(len(q), -1)


class T5Evaluation(Evaluation):
    """Encoder and decoder."""

    def heads(self, name: str, h: np.ndarray) -> np.ndarray:
        """Those of values may have another size than those of keys."""
        return (h @ self.w[name].T).reshape(len(h), HEADS, -1)

    def attention(
        self,
        x: np.ndarray,
        prefix: str,
        bias: np.ndarray | float,
        text: np.ndarray | None = None,
        *,
        causal: bool = False,
    ) -> np.ndarray:
        """Branch of x [T, D]; text: states that keys and values are made of, those of x themselves without it."""
        h = ref.rms_norm(x, self.w[f"{prefix}_norm"], self.eps)
        q = self.heads(f"{prefix}_q", h)
        k, v = (self.heads(f"{prefix}_{name}", h if text is None else text) for name in "kv")
        return attended(q, k, v, bias, causal=causal) @ self.w[f"{prefix}_o"].T

    def network(self, x: np.ndarray, p: str) -> np.ndarray:
        h = ref.rms_norm(x, self.w[f"{p}.ffn_norm"], self.eps)
        up = h @ self.w[f"{p}.ffn_up"].T
        gate = self.w.get(f"{p}.ffn_gate")
        hidden = np.maximum(up, 0) if gate is None else ref.gelu(h @ gate.T) * up
        return hidden @ self.w[f"{p}.ffn_down"].T

    def table(self, p: str, stack: str) -> np.ndarray:
        return self.w.get(f"{p}.attn_rel_b", self.w[f"{stack}.blk.0.attn_rel_b"])

    def states(self, tokens: np.ndarray) -> np.ndarray:
        """Normed states of the encoder [T, D]."""
        x = self.w["token_embd"][tokens]
        for il in range(self.n_layer):
            p = f"enc.blk.{il}"
            x = x + self.attention(x, f"{p}.attn", biases(self.table(p, "enc"), len(x), both_ways=True))
            x = x + self.network(x, p)
        return ref.rms_norm(x, self.w["enc.output_norm"], self.eps)

    def logits(self, text: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Of the decoder's tokens [T] behind the encoder's text: [T, V]."""
        states, x = self.states(text), self.w["token_embd"][tokens]
        for il in range(self.keys.get("decoder_block_count", self.n_layer)):
            p = f"dec.blk.{il}"
            x = x + self.attention(x, f"{p}.attn", biases(self.table(p, "dec"), len(x), both_ways=False), causal=True)
            x = x + self.attention(x, f"{p}.cross_attn", 0.0, states)
            x = x + self.network(x, p)
        x = ref.rms_norm(x, self.w["dec.output_norm"], self.eps)
        if "output" in self.w:
            return x @ self.w["output"].T
        return x @ self.w["token_embd"].T / math.sqrt(D)


def t5encoder() -> tuple[RandomModel, np.ndarray]:
    """With a gate and biases of the first layer."""
    m = new_t5("t5encoder", 131)
    return m, T5Evaluation(m).states(TOKENS)


def umt5encoder() -> tuple[RandomModel, np.ndarray]:
    """With biases of every layer."""
    m = new_t5("t5encoder", 132, own_biases=True)
    return m, T5Evaluation(m).states(TOKENS)
