"""Llama 4 Scout and Maverick, the text part."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import (
    ATTENTION,
    Family,
    Keys,
    Modules,
    View,
    feed_forward,
)
from ikpy.convert.families.llama import is_rotated


class Llama4(Family):
    """Scout and Maverick, the text part. Checkpoints hold adjacent pairs already."""

    arch = "llama4"
    has_windows = True
    rope_scalings = ("llama3",)
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **feed_forward("feed_forward"),
        **feed_forward("feed_forward.shared_expert", "_shexp"),
        "feed_forward.router": "ffn_gate_inp",
        "feed_forward.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "feed_forward.experts.down_proj": "ffn_down_exps",
    }

    def check(self) -> None:
        super().check()
        config, n_layer = self.config, self.config.n_layer
        chunk = config.integer("attention_chunk_size", default=8192)
        config.require(f"attention_chunk_size {chunk} instead of 8192", chunk == 8192)
        tuning = bool(config.get("attn_temperature_tuning", default=True))
        floor, scale = config.number("floor_scale", default=8192), config.number("attn_scale", default=0.1)
        is_known = tuning and (floor, scale) == (8192, 0.1)
        config.require(
            f"attn_temperature_tuning {tuning} with floor_scale {floor:g} and attn_scale {scale:g}", is_known
        )
        norm = bool(config.get("use_qk_norm", default=True))
        config.require(f"use_qk_norm {norm} with {self.n_expert} experts", norm == (self.n_expert != 128))
        rotated = config.get("no_rope_layers", default=None) or [(il + 1) % 4 != 0 for il in range(n_layer)]
        config.require(
            "layers without RoPE that are not every fourth", [bool(r) for r in rotated] == is_rotated(n_layer)
        )

    def keys(self) -> Keys:
        keys = super().keys()
        keys["feed_forward_length"] = self.config.integer("intermediate_size_mlp")
        keys["expert_feed_forward_length"] = self.config.integer("intermediate_size")
        keys["interleave_moe_layer_step"] = self.config.integer("interleave_moe_layer_step")
        return keys

    def view(self, target: str, source: str) -> View | None:
        if "experts." not in source:
            return super().view(target, source)
        if target == "ffn_down_exps":
            return _transposed
        return lambda values: np.split(_transposed(values), 2, axis=1)[target == "ffn_up_exps"]


def _transposed(values: np.ndarray) -> np.ndarray:
    return values.swapaxes(-1, -2)
