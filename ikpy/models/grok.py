"""grok: Grok-1 and 2. Norms behind both branches, capped scores, embeddings and logits that are scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts, dense_ffn, moe_ffn
from ikpy.models.feed_forward import take_dense, take_experts
from ikpy.models.hparams import HParams, check_experts
from ikpy.models.keys import Keys
from ikpy.models.routing import Routing
from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource

# Of Grok-1, whose first files do not say them.
OUTPUT_SCALE = 0.08838834764831845
SOFTCAP = 30.0
EMBEDDING_SCALE = 78.38367176906169
LOGIT_SCALE = 0.5773502691896257


@dataclass
class Beside:
    """Experts and the dense network beside them."""

    experts: Experts
    dense: DenseFFN


class Grok(Transformer):
    """Weights of the chosen experts are what the softmax over all gave them. Grok-2 has a dense network beside the
    experts; the sum of both is divided by the root of 2.
    """

    rope_neox = True
    activation = "gelu"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        check_experts(keys, hp)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length", 0)
        hp.routing = Routing(hp.n_expert_used, "softmax")
        hp.embedding_scale = keys.f32("embedding_scale", EMBEDDING_SCALE)
        hp.logit_scale = keys.f32("logit_scale", LOGIT_SCALE)
        hp.attn_softcap = keys.f32("attn_logit_softcapping", SOFTCAP)
        hp.final_softcap = keys.f32("final_logit_softcapping", 0.0)
        self.router_cap = keys.f32("router_logit_softcapping", 0.0)
        self.score_scale = keys.f32("attention.output_scale", OUTPUT_SCALE)
        return hp

    def attention_scale(self, layer: int) -> float:
        return self.score_scale

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> Any:
        hp = self.hp
        experts = take_experts(weights, prefix, hp.n_embd, hp.n_expert, hp.n_ff_exp or hp.n_ff[il])
        if not weights.has(f"{prefix}.ffn_up.weight"):
            return experts
        return Beside(experts, take_dense(weights, prefix, hp.n_embd, hp.n_ff[il]))

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        layer = super().load_layer(weights, il, prefix)
        layer.attn_post_norm = self.take_norm(weights, f"{prefix}.attn_output_norm")
        name = "post_ffw_norm" if weights.has(f"{prefix}.post_ffw_norm.weight") else "layer_output_norm"
        layer.ffn_post_norm = self.take_norm(weights, f"{prefix}.{name}")
        return layer

    def ffn(self, b: BatchGraph, ffn: Any, x: Value) -> Value:
        g, experts = b.graph, ffn.experts if isinstance(ffn, Beside) else ffn
        logits = g.softcap(g.mul_mat(experts.gate_inp, x), self.router_cap) if self.router_cap else None
        routed = moe_ffn(b, experts, self.hp.routing, x, self.activation, logits)
        if not isinstance(ffn, Beside):
            return routed
        return g.scale(g.add(dense_ffn(b, ffn.dense, x, self.activation), routed), math.sqrt(0.5))
