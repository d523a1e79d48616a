"""codeshell: CodeShell 7B. LayerNorm and biases everywhere, rotated heads."""

from __future__ import annotations

from ikpy.models.starcoder2 import StarCoder2


class CodeShell(StarCoder2):
    """All biases are there."""

    qkv_bias = "required"
    out_bias = "required"
    ffn_bias = "required"
