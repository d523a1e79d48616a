"""bailingmoe2: fused q/k/v, routing that may be limited to the best groups of experts."""

from __future__ import annotations

from dataclasses import replace

from ikpy.models.hparams import HParams
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.routed_moe import RoutedMoe
from ikpy.models.routing import expert_groups


class BailingMoe2(RoutedMoe):
    """Group-limited routing acts only in contexts with grouped_experts."""

    output_weight = "required"
    fused_qkv = "required"
    rotates_whole_head = False
    default_gating = REQUIRED
    prediction_norms = ("nextn.shared_head_norm", "layer_output_norm")

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        width = keys.u32("expert_shared_feed_forward_length") or hp.n_ff_exp
        hp.n_ff_shared = width * keys.u32("expert_shared_count")
        hp.routing = replace(hp.routing, groups=expert_groups(keys, hp.n_expert), epsilon=1e-20)
        return hp
