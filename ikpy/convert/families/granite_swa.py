"""Granite with windows and sinks (granite_swa, granitemoe_swa)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, DENSE, Keys, Modules, View, expert_half
from ikpy.convert.families.granite import Granite

_SINKS: Modules = {"self_attn.sinks": "attn_sinks"}
_FULL_LAYER_PERIOD = 4  # of configurations without a list; the first of so many layers has no window


class GraniteSwa(Granite):
    """Layers have a window or not and know positions or not, all of these by one base."""

    arch = "granite_swa"
    defaults: ClassVar[Mapping[str, int | float]] = {"num_key_value_heads": 4, "sliding_window": 128}
    modules: ClassVar[Modules] = {**ATTENTION, **_SINKS, **DENSE}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        listed = config.get("layer_rope_theta", default=None)
        self.bases = [float(config.rope()["rope_theta"])] * config.n_layer if listed is None else listed
        bases = sorted({base for base in self.bases if base})
        config.require(f"{len(self.bases)} bases of RoPE", len(self.bases) == config.n_layer)
        config.require(f"layer_rope_theta with bases {bases}", len(bases) < 2)
        if bases:
            rope = config.get("rope_parameters", "rope_scaling", default={})
            config.values["rope_parameters"] = {**rope, "rope_theta": float(bases[0])}

    def keys(self) -> Keys:
        n_layer, listed = self.config.n_layer, self.config.sliding_layers()
        usual = [il % _FULL_LAYER_PERIOD != 0 for il in range(n_layer)]
        return super().keys() | {
            "attention.sliding_window": self.config.integer("sliding_window"),
            "attention.sliding_window_pattern": usual if listed is None else listed,
            "attention.rope_pattern": [bool(base) for base in self.bases],
        }

    def notes(self) -> list[str]:
        return []


class GraniteMoeSwa(GraniteSwa):
    """Experts in every layer; gate and up of the shared expert stay one matrix."""

    defaults: ClassVar[Mapping[str, int | float]] = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    }
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **_SINKS,
        "block_sparse_moe.router": "ffn_gate_inp",
        "block_sparse_moe.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "block_sparse_moe.experts.down_proj": "ffn_down_exps",
        "shared_mlp.input_linear": "ffn_up_shexp",
        "shared_mlp.output_linear": "ffn_down_shexp",
    }

    def keys(self) -> Keys:
        width = self.config.integer("shared_intermediate_size", default=0)
        return super().keys() | ({"expert_shared_feed_forward_length": width} if width else {})

    def view(self, target: str, source: str) -> View | None:
        return expert_half(target) if source.endswith("gate_up_proj") else super().view(target, source)
