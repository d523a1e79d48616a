"""Nemotron 4, Minitron and Jais 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.families.base import ATTENTION, QKV, Change, Family, Modules

_NORMS = frozenset({"attn_norm", "ffn_norm", "output_norm"})


class Nemotron(Family):
    """LayerNorm whose weights are stored less 1, half of each head rotated, squared ReLU without a gate."""

    arch = "nemotron"
    norm_key = "attention.layer_norm_epsilon"
    norm_offset = 1.0
    biases = _NORMS | QKV | {"attn_output", "ffn_up", "ffn_down"}
    needed_biases = _NORMS
    needs_output = True
    rotates_part = True
    rotary_fraction = 0.5
    activations = ("relu2",)
    aliases: ClassVar[Mapping[str, str]] = {"norm_eps": "layer_norm_eps", "rope_percent": "partial_rotary_factor"}
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5}
    modules: ClassVar[Modules] = {**ATTENTION, "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}

    def check(self) -> None:
        super().check()
        size = self.config.head_dim
        given = self.config.integer("kv_channels", default=size)
        self.config.require(f"kv_channels {given} beside heads of {size}", given == size)

    def bias_change(self, target: str) -> Change | None:
        return None


class Jais2(Nemotron):
    """Norm weights as they are, heads that are rotated as a whole."""

    arch = "jais2"
    norm_offset = 0.0
    rotates_part = False
    rotary_fraction = 1.0
    aliases: ClassVar[Mapping[str, str]] = {}

    def needed_tensors(self) -> frozenset[str]:
        names = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"), "mlp_bias": ("ffn_up", "ffn_down")}
        return frozenset(
            f"{name}.bias" for key, found in names.items() if self.config.get(key, default=True) for name in found
        )
