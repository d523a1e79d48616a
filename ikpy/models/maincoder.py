"""maincoder: Maincoder 1B, head norms behind RoPE."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Maincoder(Transformer):
    """llama blocks with a norm of every head of q and k."""

    qk_norm = "required"
    norms_after_rope = True
