"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from typing import ClassVar

from ikpy.convert.families.base import (
    ATTENTION,
    ATTENTION_AND_DENSE,
    DENSE,
    EXPERTS,
    SHARED,
    Family,
    Keys,
    Modules,
)

LARGEST_NORM_MIN = 1e-6
"""Bounds of the sum of the chosen experts' probabilities that no sum reaches."""


class Ernie45(Family):
    """Dense ERNIE 4.5; adjacent pairs already."""

    arch = "ernie4_5"
    biases = ATTENTION_AND_DENSE


class Ernie45Moe(Ernie45):
    """Experts in every n-th layer from some layer on."""

    arch = "ernie4_5-moe"
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **DENSE,
        **EXPERTS,
        **SHARED,
        "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    }

    @property
    def n_expert(self) -> int:
        return self.config.count("moe_num_experts")

    def check(self) -> None:
        super().check()
        end = self.config.integer("moe_layer_end_index", default=-1)
        self.config.require(f"moe_layer_end_index {end}", end in (-1, self.config.n_layer - 1))
        least = self.config.number("moe_norm_min", default=0.0)
        self.config.require(f"moe_norm_min {least:g}", least <= LARGEST_NORM_MIN)

    def keys(self) -> Keys:
        config = self.config
        width = config.integer("moe_intermediate_size")
        return super().keys() | {
            "expert_feed_forward_length": width,
            "expert_shared_feed_forward_length": width * config.integer("moe_num_shared_experts", default=0),
            "leading_dense_block_count": config.integer("moe_layer_start_index", default=0),
            "interleave_moe_layer_step": config.integer("moe_layer_interval", default=1),
        }
