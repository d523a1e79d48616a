"""plamo: PLaMo 13B. Both branches side by side under one norm."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Plamo(Transformer):
    """Heads of q that share one of k lie side by side in files."""

    parallel = True
    ffn_norm_name = "attn_norm"
    fused_qkv = "optional"
    output_weight = "required"
    rope_neox = True
