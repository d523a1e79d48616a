"""bailingmoe2: fused q/k/v, routing that may be limited to the best groups of experts."""

from __future__ import annotations

from dataclasses import replace

from ikpy.errors import FileFormatError
from ikpy.models.hparams import HParams
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.routed_moe import RoutedMoe


class BailingMoe2(RoutedMoe):
    """Group-limited routing acts only in contexts with grouped_experts."""

    output_weight = "required"
    fused_qkv = True
    rotates_whole_head = False
    default_gating = REQUIRED

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        width = keys.u32("expert_shared_feed_forward_length") or hp.n_ff_exp
        hp.n_ff_shared = width * keys.u32("expert_shared_count")
        n_group, n_used = keys.u32("expert_group_count"), keys.u32("expert_group_used_count")
        if n_group > 1 and (hp.n_expert % n_group or not 0 < n_used <= n_group):
            raise FileFormatError(
                f"{keys.gguf.path}: {n_used} of {n_group} expert groups used with {hp.n_expert} experts"
            )
        hp.routing = replace(hp.routing, groups=(n_group, n_used), epsilon=1e-20)
        return hp
