"""gpt-oss: attention sinks, clamped SwiGLU experts with biases."""

from __future__ import annotations

import math

from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import take_experts
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routing import Routing
from ikpy.models.transformer import Transformer
from ikpy.models.weights import WeightSource


class GptOss(Transformer):
    """Even layers attend to a window; a sink logit per head joins the softmax denominator."""

    output_weight = "required"
    qkv_bias = "required"
    out_bias = "required"
    attn_sinks = "required"
    ffn_norm_name = "post_attention_norm"
    activation = "swiglu_oai"
    rope_neox = True
    rotates_whole_head = False
    window_rope_of_file = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.n_swa = keys.u32("attention.sliding_window")
        hp.routing = Routing(hp.n_expert_used, "selected_softmax")
        return hp

    def window(self, layer: int) -> tuple[str, int]:
        return ("sliding", self.hp.n_swa) if layer % 2 == 0 else ("none", 0)

    def attention_scale(self, layer: int) -> float:
        return 1.0 / math.sqrt(self.hp.n_rot)

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        hp = self.hp
        return take_experts(weights, prefix, hp.n_embd, hp.n_expert, hp.n_ff_exp, bias="required")
