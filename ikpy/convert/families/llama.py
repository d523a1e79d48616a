"""LLaMA 1 to 3, Mistral, Ministral 8B, IQuest Coder, Mixtral, Ministral 3, SmolLM3, Seed-OSS."""

from __future__ import annotations

import math
from typing import ClassVar

from ikpy.convert.families.base import (
    ATTENTION,
    ATTENTION_AND_DENSE,
    DENSE,
    MIXTRAL_EXPERTS,
    QKV,
    Family,
    Keys,
    Modules,
)
from ikpy.convert.rope import yarn_corners, yarn_magnitude


class Llama(Family):
    """LLaMA 1 to 3, Mistral and look-alikes."""

    arch = "llama"
    biases = ATTENTION_AND_DENSE
    rotates_pairs = True
    has_windows = True  # told by a note
    rope_scalings = ("llama3",)

    def notes(self) -> list[str]:
        window = self.config.get("sliding_window", default=None)
        if not window or window >= self.config.integer("max_position_embeddings"):
            return []
        return [f"the attention window of {window} tokens is not part of this architecture; beyond it results differ"]


class IQuestCoder(Llama):
    """IQuest Coder, whose configuration may name a window that is not used."""

    def check(self) -> None:
        super().check()
        clip = self.config.get("clip_qkv", default=None)
        self.config.require(f"clip_qkv {clip}", clip is None)
        windows = bool(self.config.get("use_sliding_window", default=False))
        self.config.require("use_sliding_window true", not windows)

    def notes(self) -> list[str]:
        return []


class Mixtral(Llama):
    """Experts in every layer."""

    modules: ClassVar[Modules] = {**ATTENTION, **MIXTRAL_EXPERTS}


class Ministral3(Llama):
    """Query temperature and YaRN magnitude in keys of their own."""

    arch = "mistral3"
    own_yarn_magnitude = True

    def keys(self) -> Keys:
        rope = self.config.rope()
        keys = super().keys()
        keys["attention.temperature_scale"] = float(rope.get("llama_4_scaling_beta") or 0.0)
        if rope["rope_type"] == "yarn":
            multiplier = float(rope.get("mscale_all_dim") or 0.0)
            is_known = multiplier == 0 or rope.get("mscale") == 1
            self.config.require(f"YaRN with mscale {rope.get('mscale')}", is_known)
            factor, given = float(rope["factor"]), rope.get("attention_factor")
            usual = yarn_magnitude(factor) / yarn_magnitude(factor, multiplier)
            self.config.require(f"YaRN with attention_factor {given}", given is None or math.isclose(given, usual))
            keys |= yarn_corners(rope) | {"rope.scaling.yarn_log_multiplier": multiplier}
        elif keys["attention.temperature_scale"]:
            keys["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
        return keys


class SmolLM3(Family):
    """Every fourth layer has no RoPE."""

    arch = "smollm3"
    rotates_pairs = True

    def check(self) -> None:
        super().check()
        n_layer = self.config.n_layer
        interval = self.config.integer("no_rope_layer_interval", default=4)
        usual = [(il + 1) % interval for il in range(n_layer)]
        rotated = self.config.get("no_rope_layers", default=None) or usual
        self.config.require(
            "layers without RoPE that are not every fourth", [bool(r) for r in rotated] == is_rotated(n_layer)
        )


class SeedOss(Family):
    """Optional biases of q, k and v."""

    arch = "seed_oss"
    biases = QKV
    modules: ClassVar[Modules] = {**ATTENTION, **DENSE, "post_attention_layernorm": "post_attention_norm"}


def is_rotated(n_layer: int) -> list[bool]:
    """Layers with RoPE where every fourth has none."""
    return [(il + 1) % 4 != 0 for il in range(n_layer)]
