"""xverse: XVERSE 7B, 13B and 65B, the blocks of llama."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Xverse(Transformer):
    """An output matrix of its own."""

    fused_qkv = "optional"
    output_weight = "required"
