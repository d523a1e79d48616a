"""gpt2: GPT-2 and look-alikes. Embedded positions, LayerNorm and biases everywhere."""

from __future__ import annotations

from ikpy.models.starcoder2 import StarCoder2


class Gpt2(StarCoder2):
    """The blocks of starcoder2 without rotation."""

    embeds_positions = True
    qkv_bias = "required"
    out_bias = "required"
    ffn_bias = "required"
