"""qwen2: required q/k/v biases, NEOX rotation."""

from __future__ import annotations

from ikpy.models.transformer import Transformer
from ikpy.models.weights import WeightSource


class Qwen2(Transformer):
    """q/k/v biases; a stray output.bias is accepted and ignored."""

    qkv_bias = "required"
    rope_neox = True

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        weights.skip("output.bias")
