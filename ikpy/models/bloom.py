"""bloom: BLOOM and BLOOMZ. Linear biases (ALiBi) instead of rotation, a norm of the embeddings (arXiv:2211.05100)."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.alibi import MAX_BIAS, LinearBiases
from ikpy.models.batch import BatchGraph
from ikpy.models.starcoder2 import StarCoder2
from ikpy.models.weights import WeightSource


class Bloom(LinearBiases, StarCoder2):
    """Biases everywhere. The slopes of all published models are those of a largest bias of 8."""

    usual_max_bias = MAX_BIAS
    qkv_bias = "required"
    out_bias = "required"
    ffn_bias = "required"

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        self.embd_norm = self.take_norm(weights, "token_embd_norm")

    def embed(self, b: BatchGraph) -> Value:
        return self.norm(b, super().embed(b), self.embd_norm)
