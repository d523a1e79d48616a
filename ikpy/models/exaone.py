"""exaone: EXAONE 3, 3.5 and Deep, llama blocks with NEOX rotation."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Exaone(Transformer):
    """Optional biases of q, k and v and frequency factors."""

    qkv_bias = "optional"
    rope_neox = True
    rope_freqs_weight = "optional"
