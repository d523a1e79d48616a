"""cohere2moe: Command A+, the blocks of cohere2 with routed and shared experts behind leading dense layers."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.command_r import CommandR
from ikpy.models.hparams import HParams, check_experts
from ikpy.models.keys import Keys
from ikpy.models.prediction import PredictionLayers
from ikpy.models.routing import Routing, gating_func
from ikpy.models.windows import periodic_window_layers

RMS_EPSILON = "attention.layer_norm_rms_epsilon"
SIGMOID = 2


class Cohere2Moe(PredictionLayers, CommandR):
    """Layers with a window, leading dense ones and prediction layers know positions. Of the routed experts and the
    shared one the mean is taken. Norms take the mean off unless the file has an epsilon of RMS norms.
    """

    output_weight = "optional"
    may_norm_heads = False

    def read_hparams(self, keys: Keys) -> HParams:
        self.layer_norm = not keys.f32(RMS_EPSILON, 0.0)
        hp = super().read_hparams(keys)
        check_experts(keys, hp)
        hp.n_swa = keys.u32("attention.sliding_window")
        hp.n_dense_layers = keys.u32("leading_dense_block_count")
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        n_shared = keys.u32("expert_shared_count", 0)
        if n_shared:
            hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", 0) or n_shared * (hp.n_ff_exp or hp.n_ff[-1])
        hp.routing = Routing(
            hp.n_expert_used,
            gating_func(keys, keys.u32("expert_gating_func", 0) or SIGMOID),
            normalize=keys.boolean("expert_weights_norm", False),
            scale=keys.f32("expert_weights_scale", 0.0) or 1.0,
        )
        self.take_off_prediction_layers(keys, hp)
        ahead = [False] * self.n_predict_layers
        self.has_window = [*periodic_window_layers(keys, hp.n_layer, full_first=True), *ahead]
        self.rotated = [
            has_window or not hp.n_dense_layers <= il < hp.n_layer for il, has_window in enumerate(self.has_window)
        ]
        return hp

    def is_rotated(self, layer: int) -> bool:
        return self.rotated[layer]

    def start_at(self, layer: int) -> None:
        super().start_at(layer)
        self.has_window, self.rotated = self.has_window[layer:], self.rotated[layer:]

    def ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        out = super().ffn(b, ffn, x)
        return b.graph.scale(out, 0.5) if isinstance(ffn, Experts) and ffn.shared is not None else out
