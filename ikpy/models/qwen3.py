"""qwen3: RMS norm of every query and key head before RoPE (model semantics 3.5)."""

from __future__ import annotations

from ikpy.models.llama import Llama
from ikpy.models.weights import WeightSource


class Qwen3(Llama):
    """Llama blocks without biases, with per-head q/k norms and NEOX rotation."""

    qkv_bias = "none"
    out_bias = False
    ffn_bias = False
    qk_norm = True
    rope_neox = True

    def load_global(self, weights: WeightSource) -> None:
        self.rope_freqs = None
