"""minimax-m2: one q/k norm over all heads together, biased expert selection (model semantics 3.19)."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import split_heads
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routing import Routing, gating_func
from ikpy.models.transformer import Attention, Transformer
from ikpy.models.weights import WeightSource


class MiniMaxM2(Transformer):
    """Every layer has experts of width feed_forward_length; RoPE on the first n_rot elements of each head."""

    selection_bias = "required"
    rope_neox = True
    rotates_whole_head = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        keys.u32("expert_feed_forward_length")  # present in every file; the experts have feed_forward_length
        gating = gating_func(keys, keys.u32("expert_gating_func", 1))
        hp.routing = Routing(hp.n_expert_used, gating, normalize=True)
        return hp

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        attn = super().load_attention(weights, il, prefix)
        assert attn.k is not None
        attn.q_norm = weights.take(f"{prefix}.attn_q_norm.weight", (attn.q.shape[1],))
        attn.k_norm = weights.take(f"{prefix}.attn_k_norm.weight", (attn.k.shape[1],))
        return attn

    def norm_head(self, b: BatchGraph, x: Value, weight: Value | None) -> Value:
        """x [dk, H, T] normalised over all heads of a token."""
        rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
        return split_heads(super().norm_head(b, rows, weight), x.shape[0])
