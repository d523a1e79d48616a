"""command-r: LayerNorm, attention and feed-forward network side by side."""

from __future__ import annotations

from typing import ClassVar

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Attention, Transformer
from ikpy.models.weights import Presence, WeightSource

LAYERS_WITH_HEAD_NORMS = 64


class CommandR(Transformer):
    """x + attention(h) + ffn(h) with h = norm(x); the large model also normalises every head of q and k."""

    output_weight: ClassVar[Presence] = "none"
    layer_norm = True
    parallel = True
    rotates_whole_head = False
    ffn_norm_name = "attn_norm"  # one norm feeds both branches
    may_norm_heads: ClassVar[bool] = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.logit_scale = keys.f32("logit_scale")
        return hp

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> Attention:
        attn = super().load_attention(weights, il, prefix)
        hp = self.hp
        if self.may_norm_heads and hp.n_layer >= LAYERS_WITH_HEAD_NORMS:
            attn.q_norm = weights.take(f"{prefix}.attn_q_norm.weight", (hp.n_embd_head_k, hp.n_head[il]))
            attn.k_norm = weights.take(f"{prefix}.attn_k_norm.weight", (hp.n_embd_head_k, hp.n_head_kv[il]))
        return attn
