"""smallthinker: SmallThinker 4B-A0.6B and 21B-A3B. Routers read the residual stream in front of attention, experts are
of ReLU (arXiv:2507.20984).
"""

from __future__ import annotations

from collections.abc import Sequence

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import Experts, moe_ffn
from ikpy.models.hparams import HParams, check_experts
from ikpy.models.keys import Keys
from ikpy.models.routing import SIGMOID, Routing, gating_func
from ikpy.models.transformer import Layer, Transformer
from ikpy.models.windows import periodic_window_layers

PERIOD = 4


class SmallThinker(Transformer):
    """Where a file names a window, all but the first of every four layers have it, and these alone know positions."""

    fused_qkv = "optional"
    rope_neox = True
    activation = "relu"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        check_experts(keys, hp)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length", 0)
        hp.n_swa = keys.u32("attention.sliding_window", 0)
        if hp.n_swa:
            self.has_window = periodic_window_layers(keys, hp.n_layer, PERIOD, full_first=True)
        gating = keys.u32("expert_gating_func", 0) or SIGMOID
        hp.routing = Routing(
            hp.n_expert_used,
            gating_func(keys, gating),
            normalize=True,
            scale=keys.f32("expert_weights_scale", 0.0) or 1.0,
        )
        return hp

    def is_rotated(self, layer: int) -> bool:
        return not self.has_window or self.has_window[layer]

    def token_inputs(self, b: BatchGraph, il: int, x: Value) -> Sequence[Value]:
        layer: Layer = self.layers[il]  # type: ignore[assignment]
        assert isinstance(layer.ffn, Experts)
        return (b.graph.mul_mat(layer.ffn.gate_inp, x),)

    def behind_attention(self, b: BatchGraph, layer: Layer, attended: Value, x: Value, *inputs: Value) -> Value:
        assert isinstance(layer.ffn, Experts)
        x = self.add_branch(b, x, self.attention_output(b, layer.attn, attended), None)
        h = self.norm(b, x, layer.ffn_norm)
        return b.graph.add(x, moe_ffn(b, layer.ffn, self.hp.routing, h, self.activation, inputs[0]))
