"""Phi-3, Phi-3.5 and Phi-4 (phi3)."""

from __future__ import annotations

from typing import ClassVar

from ikpy.convert.families.base import ATTENTION, Keys, Modules
from ikpy.convert.families.long_rope import LongRope

_PROJECTIONS = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


class Phi3(LongRope):
    """Fused projections; LongRoPE factors for short and long contexts as tensors."""

    arch = "phi3"
    rotates_part = True
    needs_output = True
    modules: ClassVar[Modules] = {**ATTENTION, **_PROJECTIONS}

    def keys(self) -> Keys:
        window = self.config.integer("sliding_window", default=0)
        return super().keys() | {"attention.sliding_window": window} | self.long_keys()
