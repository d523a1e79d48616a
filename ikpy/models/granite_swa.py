"""granite_swa: Granite with windows and sinks, dense and with experts."""

from __future__ import annotations

from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import take_experts, take_fused_dense
from ikpy.models.granite import Granite
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource

ROTATED = "attention.rope_pattern"


class GraniteSwa(Granite):
    """The file says which layers have a window and which know positions; gate and up of the shared expert are one
    matrix.
    """

    needs_scales = False
    attn_sinks = "required"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.residual_scale, hp.embedding_scale = hp.residual_scale or 1.0, hp.embedding_scale or 1.0
        hp.n_swa = keys.u32("attention.sliding_window")
        self.has_window = [bool(flag) for flag in keys.per_layer("attention.sliding_window_pattern", hp.n_layer)]
        self.rotated = [bool(flag) for flag in keys.per_layer(ROTATED, hp.n_layer, 1)]
        return hp

    def is_rotated(self, layer: int) -> bool:
        return super().is_rotated(layer) and self.rotated[layer]

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        hp = self.hp
        if not self.is_moe(il):
            return super().load_ffn(weights, il, prefix)
        experts = take_experts(weights, prefix, hp.n_embd, hp.n_expert, hp.n_ff[il])
        if hp.n_ff_shared:
            experts.shared = take_fused_dense(weights, prefix, hp.n_embd, hp.n_ff_shared, suffix="_shexp")
        return experts
