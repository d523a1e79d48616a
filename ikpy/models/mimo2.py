"""mimo2: MiMo-V2-Flash, window layers with sinks and KV heads of their own, keys wider than values."""

from __future__ import annotations

from dataclasses import replace

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routed_moe import RoutedMoe
from ikpy.models.transformer import Attention
from ikpy.models.windows import window_layers


class Mimo2(RoutedMoe):
    """Layers with a router have experts, the others a dense network; what was attended to may be scaled. Prediction
    layers read states before the output norm.
    """

    output_weight = "required"
    qk_norm = "none"
    fused_qkv = "optional"
    rotates_whole_head = False
    default_n_dense = 0
    dense_without_router = True
    default_n_shared = 0
    attn_sinks = "optional"
    default_scale = 1.0
    predicts_from_normed = False
    heads_take_turns = True
    prediction_norms = ("nextn.shared_head_norm", "layer_output_norm")

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window")
        hp.routing = replace(hp.routing, gating="sigmoid", normalize=True)
        self.has_window = window_layers(keys, hp.n_layer + self.n_predict_layers, period=1)
        self.value_scale = keys.f32("attention.value_scale", 1.0)
        return hp

    def attention_output(self, b: BatchGraph, attn: Attention, attended: Value) -> Value:
        out = super().attention_output(b, attn, attended)
        return out if self.value_scale == 1.0 else b.graph.scale(out, self.value_scale)
