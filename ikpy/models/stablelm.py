"""stablelm: StableLM 3B, 2 1.6B and 2 12B. LayerNorm, partly rotated heads, SwiGLU."""

from __future__ import annotations

from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource


class StableLM(Transformer):
    """The 12B model has norms of every head and, without a norm of the network, both branches side by side."""

    layer_norm = True
    norm_bias = "required"
    fused_qkv = "optional"
    qkv_bias = "optional"
    qk_norm = "optional"
    norms_heads_apart = True
    output_weight = "required"
    rope_neox = True
    rotates_whole_head = False

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        if il == 0:
            self.parallel = not weights.has(f"{prefix}.ffn_norm.weight")
            self.ffn_norm_name = "attn_norm" if self.parallel else "ffn_norm"
        return super().load_layer(weights, il, prefix)
