"""phimoe: Phi-3.5-MoE. LayerNorm, biases everywhere, LongRoPE, experts weighed by a sparse mixer (arXiv:2409.12136)."""

from __future__ import annotations

from ikpy.models.hparams import HParams, check_experts
from ikpy.models.keys import Keys
from ikpy.models.long_rope import LongRope
from ikpy.models.routing import Routing
from ikpy.models.transformer import Transformer


class PhiMoe(LongRope, Transformer):
    """Files call the epsilon of LayerNorm that of RMS norms."""

    layer_norm = True
    epsilon_key = "attention.layer_norm_rms_epsilon"
    norm_bias = "required"
    fused_qkv = "optional"
    qkv_bias = "optional"
    out_bias = "optional"
    output_weight = "required"
    output_bias = "optional"
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        check_experts(keys, hp)
        hp.routing = Routing(hp.n_expert_used, "sparse_mixer")
        return hp
