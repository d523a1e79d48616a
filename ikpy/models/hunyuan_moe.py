"""hunyuan-moe: q/k norms after RoPE, routed and shared experts (model semantics 3.12)."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, GraphParams
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Attention, Transformer


class HunyuanMoe(Transformer):
    """Experts of width feed_forward_length, renormalised softmax routing."""

    qk_norm = "required"
    rope_neox = True
    rope_scale_from_metadata = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        keys.u32("expert_feed_forward_length")  # present in every file; the experts have feed_forward_length
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length")
        return hp

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None  # a norm weight lies between the rotation and the cached keys

    def place_heads(self, b: BatchGraph, il: int, attn: Attention, q: Value, k: Value) -> tuple[Value, Value]:
        q, k = self.rotate(b, il, q), self.rotate(b, il, k)
        return self.norm_head(b, q, attn.q_norm), self.norm_head(b, k, attn.k_norm)
