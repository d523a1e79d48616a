"""Phi-3, Phi-3.5 and Phi-4 (phi3)."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import ATTENTION, Family, Keys, Modules

_PROJECTIONS = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


class Phi3(Family):
    """Fused projections; LongRoPE factors for short and long contexts as tensors."""

    arch = "phi3"
    rotates_part = True
    rope_scalings = ("longrope", "su")
    needs_output = True
    modules: ClassVar[Modules] = {**ATTENTION, **_PROJECTIONS}

    @property
    def original_context(self) -> int:
        """Context length of training before it was stretched."""
        n_ctx = self.config.integer("max_position_embeddings")
        rope = self.config.rope()
        return int(
            rope.get("original_max_position_embeddings")
            or self.config.integer("original_max_position_embeddings", default=n_ctx)
        )

    def keys(self) -> Keys:
        keys = super().keys()
        keys["attention.sliding_window"] = self.config.integer("sliding_window", default=0)
        keys["rope.scaling.original_context_length"] = self.original_context
        rope = self.config.rope()
        if "long_factor" in rope:
            factor = self.config.integer("max_position_embeddings") / self.original_context
            magnitude = math.sqrt(1 + math.log(factor) / math.log(self.original_context)) if factor > 1 else 1.0
            keys["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or magnitude)
        return keys

    def extra_tensors(self) -> dict[str, np.ndarray]:
        rope = self.config.rope()
        return {
            f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
            if f"{kind}_factor" in rope
        }
