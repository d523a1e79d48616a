"""arctic: Snowflake Arctic. A dense network behind attention, experts beside both."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import take_dense
from ikpy.models.hparams import HParams, check_experts
from ikpy.models.keys import Keys
from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource


@dataclass
class ArcticLayer(Layer):
    """A dense block with experts, and their norm of what attention reads."""

    experts: DenseFFN | Experts | None = None
    experts_norm: Value | None = None


class Arctic(Transformer):
    """The dense network is as wide as the residual stream."""

    fused_qkv = "optional"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        check_experts(keys, hp)
        return hp

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        return take_dense(weights, prefix, self.hp.n_embd, self.hp.n_embd)

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        return ArcticLayer(
            **vars(super().load_layer(weights, il, prefix)),
            experts=super().load_ffn(weights, il, prefix),
            experts_norm=self.take_norm(weights, f"{prefix}.ffn_norm_exps"),
        )

    def behind_attention(self, b: BatchGraph, layer: Layer, attended: Value, x: Value, *inputs: Value) -> Value:
        assert isinstance(layer, ArcticLayer) and layer.experts is not None
        routed = self.ffn(b, layer.experts, self.norm(b, x, layer.experts_norm))
        return b.graph.add(super().behind_attention(b, layer, attended, x), routed)
