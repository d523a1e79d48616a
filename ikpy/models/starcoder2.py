"""starcoder2: StarCoder 2 and Granite Code 20B and 34B. LayerNorm, biases everywhere, a network without a gate."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class StarCoder2(Transformer):
    """The network is of GELU by tanh."""

    layer_norm = True
    norm_bias = "required"
    fused_qkv = "optional"
    qkv_bias = "optional"
    out_bias = "optional"
    ffn_bias = "optional"
    rope_neox = True
    activation = "gelu"
    gated_ffn = False
