"""Phi-3, Phi-3.5 and Phi-4 (phi3), Phi-3.5-MoE (phimoe)."""

from __future__ import annotations

import math
from typing import ClassVar

from ikpy.convert.families.base import ATTENTION, MIXTRAL_EXPERTS, QKV, Keys, Modules, full_window_note
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


JITTER = 0.01
"""Of routers, which decides which experts are near the best."""
_NORMS = frozenset({"attn_norm", "ffn_norm", "output_norm"})


class PhiMoe(LongRope):
    """LayerNorm with biases, whose epsilon files call that of RMS norms; factors of LongRoPE as phi3."""

    arch = "phimoe"
    biases = _NORMS | QKV | {"attn_output", "output"}
    needed_biases = _NORMS
    needs_output = True
    has_windows = True  # told by a note
    modules: ClassVar[Modules] = {**ATTENTION, **MIXTRAL_EXPERTS}

    def check(self) -> None:
        super().check()
        config = self.config
        jitter = config.number("router_jitter_noise", default=JITTER)
        config.require(f"router_jitter_noise {jitter:g}", math.isclose(jitter, JITTER))
        used = config.integer("num_experts_per_tok", default=2)
        config.require(f"num_experts_per_tok {used}", used == 2)
        rope = config.rope()
        config.require("another magnitude of long contexts", rope.get("short_mscale") == rope.get("long_mscale"))
        kind = rope["rope_type"]
        config.require(f"RoPE scaling '{kind}'", kind in ("default", *self.rope_scalings))

    def needed_tensors(self) -> frozenset[str]:
        has_biases = bool(self.config.get("attention_bias", default=False))
        names = ("attn_q", "attn_k", "attn_v", "attn_output") if has_biases else ()
        return frozenset(f"{name}.bias" for name in names)

    def keys(self) -> Keys:
        magnitude = self.config.rope().get("short_mscale")
        own: Keys = {} if magnitude is None else {"rope.scaling.attn_factor": float(magnitude)}
        return super().keys() | self.long_keys() | own

    def notes(self) -> list[str]:
        return full_window_note(self.config)
