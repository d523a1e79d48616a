"""chatglm: ChatGLM 2 and 3, GLM-4 9B and GLM-Edge. Partly rotated heads, fused SwiGLU."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class ChatGlm(Transformer):
    """RoPE on the first n_rot elements of each head."""

    fused_qkv = "optional"
    qkv_bias = "optional"
    fused_ffn = True
    rotates_whole_head = False
