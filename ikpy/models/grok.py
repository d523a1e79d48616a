"""grok: Grok-1. Norms behind both branches, capped scores, embeddings and logits that are scaled."""

from __future__ import annotations

from ikpy.errors import UnsupportedError
from ikpy.models.blocks import DenseFFN, Experts
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


class Grok(Transformer):
    """Weights of the chosen experts are what the softmax over all gave them."""

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
        self.score_scale = keys.f32("attention.output_scale", OUTPUT_SCALE)
        return hp

    def attention_scale(self, layer: int) -> float:
        return self.score_scale

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        if weights.has(f"{prefix}.ffn_up.weight"):
            raise UnsupportedError(
                f"{weights.gguf.path}: Grok-2 (a dense network beside the experts) is not supported, only Grok-1"
            )
        return super().load_ffn(weights, il, prefix)

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        layer = super().load_layer(weights, il, prefix)
        layer.attn_post_norm = self.take_norm(weights, f"{prefix}.attn_output_norm")
        layer.ffn_post_norm = self.take_norm(weights, f"{prefix}.layer_output_norm")
        return layer
