"""starcoder2: StarCoder 2 and Granite Code 20B and 34B. LayerNorm, biases everywhere, a network without a gate."""

from __future__ import annotations

from typing import ClassVar

from ikpy.models.transformer import Transformer
from ikpy.models.weights import Presence


class StarCoder2(Transformer):
    """The network is of GELU by tanh."""

    layer_norm = True
    norm_bias = "required"
    fused_qkv = "optional"
    qkv_bias: ClassVar[Presence] = "optional"
    out_bias: ClassVar[Presence] = "optional"
    ffn_bias: ClassVar[Presence] = "optional"
    rope_neox = True
    activation = "gelu"
    gated_ffn = False
