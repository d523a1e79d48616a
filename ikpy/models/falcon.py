"""falcon: Falcon 7B, 40B, 180B and Falcon 2 11B. LayerNorm, both branches side by side (arXiv:2311.16867)."""

from __future__ import annotations

from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource


class Falcon(Transformer):
    """One norm feeds both branches; attention has one of its own (attn_norm_2) in 40B and 180B."""

    layer_norm = True
    norm_bias = "required"
    parallel = True
    ffn_norm_name = "attn_norm"
    fused_qkv = "optional"
    rope_neox = True
    activation = "gelu_erf"
    gated_ffn = False

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        layer = super().load_layer(weights, il, prefix)
        layer.attn_norm = self.take_norm(weights, f"{prefix}.attn_norm_2", "optional") or layer.attn_norm
        return layer
