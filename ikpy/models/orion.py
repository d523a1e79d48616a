"""orion: Orion 14B. The blocks of llama under LayerNorm with biases."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Orion(Transformer):
    """No other biases."""

    layer_norm = True
    norm_bias = "required"
    fused_qkv = "optional"
    output_weight = "required"
    rope_neox = True
