"""phi2: Phi-1, Phi-1.5 and Phi-2. Biases everywhere, both branches side by side, partly rotated heads."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Phi2(Transformer):
    """One norm feeds both branches; q, k and v are one tensor in older files."""

    layer_norm = True
    norm_bias = "required"
    parallel = True
    ffn_norm_name = "attn_norm"
    fused_qkv = "optional"
    qkv_bias = "required"
    out_bias = "required"
    ffn_bias = "required"
    output_weight = "required"
    output_bias = "required"
    rope_neox = True
    rotates_whole_head = False
    activation = "gelu"
    gated_ffn = False
