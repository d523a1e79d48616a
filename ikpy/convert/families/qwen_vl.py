"""Qwen 2, 2.5 and 3 VL, the text part: rotation in sections for the positions of pictures."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, EXPERTS, HEAD_NORMS, Keys, Modules, View, expert_half
from ikpy.convert.families.qwen import Qwen2, Qwen3, Qwen3Moe
from ikpy.convert.rope import section_keys


class Qwen2VL(Qwen2):
    """Sections in order."""

    arch = "qwen2vl"
    rope_scalings = (*Qwen2.rope_scalings, "mrope")

    def keys(self) -> Keys:
        return super().keys() | section_keys(self.config, self.n_rot)


def interleaved_keys(config: Config, n_rot: int) -> Keys:
    """Sections in turns, and the layers behind which features of pictures are added."""
    config.require("mrope_interleaved false", bool(config.rope().get("mrope_interleaved", True)))
    vision = config.get("vision_config", default={})
    n_deep = len(vision.get("deepstack_visual_indexes") or [])
    return {**section_keys(config, n_rot), "n_deepstack_layers": n_deep}


class Qwen3VL(Qwen3):
    """Sections in turns."""

    arch = "qwen3vl"

    def keys(self) -> Keys:
        return super().keys() | interleaved_keys(self.config, self.n_rot)


class Qwen3VLMoe(Qwen3Moe):
    """Experts of a layer lie together: [E, D, 2F] and [E, F, D] as published, the last two dimensions swapped where
    transformers has saved them."""

    arch = "qwen3vlmoe"
    normalizes_by_default = True
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **EXPERTS,
        "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "mlp.experts.down_proj": "ffn_down_exps",
    }

    def keys(self) -> Keys:
        return super().keys() | interleaved_keys(self.config, self.n_rot)

    def view(self, target: str, source: str) -> View | None:
        n_embd, n_ff = (self.config.integer(name) for name in ("hidden_size", "moe_intermediate_size"))

        def turned(values: np.ndarray) -> np.ndarray:
            published = (n_embd, 2 * n_ff) if source.endswith("gate_up_proj") else (n_ff, n_embd)
            return values.swapaxes(1, 2) if values.shape[1:] == published else values

        if source == "mlp.experts.gate_up_proj":
            half = expert_half(target)
            return lambda values: half(turned(values))
        return turned if source == "mlp.experts.down_proj" else super().view(target, source)
