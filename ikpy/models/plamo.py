"""plamo: PLaMo 13B. Both branches side by side under one norm."""

from __future__ import annotations

from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource


class Plamo(Transformer):
    """Heads of q that share one of k lie side by side in files."""

    parallel = True
    ffn_norm_name = "attn_norm"
    fused_qkv = "optional"
    output_weight = "required"
    rope_neox = True


def take_post_norms(layer: Layer, weights: WeightSource, n_embd: int, prefix: str) -> None:
    """The norms behind attention and network of PLaMo 2 and 3, whose names may have no suffix."""
    layer.attn_post_norm = weights.take(weights.written(f"{prefix}.post_attention_norm"), (n_embd,))
    layer.ffn_post_norm = weights.take(weights.written(f"{prefix}.post_ffw_norm"), (n_embd,))
