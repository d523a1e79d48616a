"""refact: Refact 1.6B. The blocks of llama with linear biases (ALiBi) instead of rotation."""

from __future__ import annotations

from ikpy.models.alibi import MAX_BIAS, LinearBiases


class Refact(LinearBiases):
    """Files do not say the largest bias."""

    usual_max_bias = MAX_BIAS
    fused_qkv = "optional"
