"""glm4: norms after both branches, fused SwiGLU, partly rotated heads."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Glm4(Transformer):
    """Optional q/k/v biases; RoPE on the first n_rot elements of each head."""

    qkv_bias = "optional"
    post_norms = "required"
    fused_ffn = True
    rotates_whole_head = False
