"""LongRoPE: factors for short and long contexts as tensors (arXiv:2402.13753)."""

from __future__ import annotations

import math

import numpy as np

from ikpy.convert.families.base import Family, Keys


class LongRope(Family):
    """The scaling changes no frequency but by these factors."""

    rope_scalings = ("longrope", "su")

    @property
    def original_context(self) -> int:
        """Context length of training before it was stretched."""
        n_ctx = self.config.n_context
        rope = self.config.rope()
        return int(
            rope.get("original_max_position_embeddings")
            or self.config.integer("original_max_position_embeddings", default=n_ctx)
        )

    def long_keys(self) -> Keys:
        """Where long contexts begin, and the magnitude of rotated elements."""
        keys: Keys = {"rope.scaling.original_context_length": self.original_context}
        rope = self.config.rope()
        if "long_factor" in rope:
            factor = self.config.n_context / self.original_context
            magnitude = math.sqrt(1 + math.log(factor) / math.log(self.original_context)) if factor > 1 else 1.0
            keys["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or magnitude)
        return keys

    def extra_tensors(self) -> dict[str, np.ndarray]:
        rope = self.config.rope()
        return super().extra_tensors() | {
            f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
            if f"{kind}_factor" in rope
        }
