"""nemotron: Nemotron 4 and Minitron, LayerNorm with biases, partly rotated heads, squared ReLU (arXiv:2402.16819)."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource


class Nemotron(Transformer):
    """The network has no gate. Checkpoints hold norm weights less 1, files the weights themselves."""

    layer_norm = True
    qkv_bias = "optional"
    out_bias = "optional"
    ffn_bias = "optional"
    output_weight = "required"
    rope_neox = True
    rotates_whole_head = False
    activation = "relu_squared"
    gated_ffn = False

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        self.norm_biases: dict[str, Value] = {}
        self.load_norm_bias(weights, self.output_norm)

    def load_norm_bias(self, weights: WeightSource, weight: Value | None) -> None:
        """Takes the bias of a norm."""
        assert weight is not None
        bias = weights.take(f"{weight.name.removesuffix('.weight')}.bias", (self.hp.n_embd,))
        self.norm_biases[weight.name] = bias

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        layer = super().load_layer(weights, il, prefix)
        self.load_norm_bias(weights, layer.attn_norm)
        self.load_norm_bias(weights, layer.ffn_norm)
        return layer

    def norm(self, b: BatchGraph, x: Value, weight: Value | None) -> Value:
        assert weight is not None
        return b.graph.layer_norm(x, weight, self.norm_biases[weight.name], self.hp.norm_eps)
