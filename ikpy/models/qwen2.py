"""qwen2: required q/k/v biases, NEOX rotation (model semantics 3.4)."""

from __future__ import annotations

from ikpy.models.llama import Llama
from ikpy.models.weights import WeightSource


class Qwen2(Llama):
    """Llama blocks with q/k/v biases; a stray output.bias is accepted and ignored."""

    qkv_bias = "required"
    out_bias = False
    ffn_bias = False
    rope_neox = True
    rope_scale_from_metadata = False

    def load_global(self, weights: WeightSource) -> None:
        self.rope_freqs = None
        weights.take("output.bias", (self.hp.n_vocab,), required=False)
