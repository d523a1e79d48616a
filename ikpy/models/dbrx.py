"""dbrx: DBRX, experts under LayerNorm without biases, q, k and v bounded."""

from __future__ import annotations

from ikpy.models.hparams import HParams, check_experts
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer


class Dbrx(Transformer):
    """Every layer has experts, whose weights are renormalised."""

    layer_norm = True
    ffn_norm_name = "attn_output_norm"
    fused_qkv = "optional"
    output_weight = "required"
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        check_experts(keys, hp)
        hp.qkv_clamp = keys.f32("attention.clamp_kqv")
        return hp
