"""Granite 4.0: layers of Mamba-2 between few that attend, or attention alone; dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, Change, Family, Keys, Modules, View
from ikpy.convert.families.granite import Granite, GraniteMoe
from ikpy.convert.families.mamba2 import CONV, mamba2, mamba2_change, mamba2_view

_KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}


def _attends(config: Config) -> list[bool]:
    """Whether each layer attends."""
    kinds = config.get("layer_types", "layers_block_type", default=["mamba"] * config.n_layer)
    config.require(f"{len(kinds)} kinds of layers", len(kinds) == config.n_layer)
    unknown = next((kind for kind in kinds if kind not in _KINDS), "")
    config.require(f"layers of kind '{unknown}'", not unknown)
    return [_KINDS[kind] for kind in kinds]


def _network(suffix: str) -> Modules:
    """The network of every token, gate and up in one matrix [2F, D]."""
    return {
        "shared_mlp.input_linear": (f"ffn_gate{suffix}", f"ffn_up{suffix}"),
        "shared_mlp.output_linear": f"ffn_down{suffix}",
    }


class GraniteShared(Granite):
    """Attention alone, dense."""

    defaults: ClassVar[Mapping[str, int | float]] = {"shared_intermediate_size": 1024}
    modules: ClassVar[Modules] = {**ATTENTION, **_network("")}

    def keys(self) -> Keys:
        return super().keys() | {
            "feed_forward_length": self.config.integer("shared_intermediate_size"),
            "rope.scaling.finetuned": self.config.get("position_embedding_type", default="") == "rope",
        }

    def view(self, target: str, source: str) -> View | None:
        if source == "shared_mlp.input_linear":
            return lambda values: np.split(values, 2)[target.startswith("ffn_up")]
        return super().view(target, source)


class GraniteMoeShared(GraniteShared, GraniteMoe):
    """Attention alone, experts beside a shared one."""

    arch = "granitemoe"
    modules: ClassVar[Modules] = {**GraniteMoe.modules, **_network("_shexp")}

    def keys(self) -> Keys:
        return super().keys() | {
            "feed_forward_length": self.config.integer("intermediate_size"),
            "expert_shared_feed_forward_length": self.config.integer("shared_intermediate_size"),
        }


class GraniteHybrid(GraniteShared):
    """Layers of Mamba-2, dense."""

    arch = "granitehybrid"
    biases = GraniteShared.biases | {CONV}
    modules: ClassVar[Modules] = {**GraniteShared.modules, **mamba2("mamba")}

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        has_experts = config.integer("num_local_experts", default=0) > 0
        if all(_attends(config)):
            return GraniteMoeShared if has_experts else GraniteShared
        return GraniteHybridMoe if has_experts else GraniteHybrid

    @property
    def n_groups(self) -> int:
        """Groups of heads that share B and C."""
        return self.config.integer("mamba_n_groups", default=1)

    def keys(self) -> Keys:
        config = self.config
        heads = config.integer("mamba_n_heads")
        inner = config.integer("mamba_expand", default=2) * config.integer("hidden_size")
        size = config.get("mamba_d_head", default="auto")
        config.require(f"{heads} heads of {size} beside {inner} elements", size in ("auto", inner / heads))
        return super().keys() | {
            "attention.head_count_kv": [self.n_head_kv if attends else 0 for attends in _attends(config)],
            "ssm.conv_kernel": config.integer("mamba_d_conv", default=4),
            "ssm.inner_size": inner,
            "ssm.state_size": config.integer("mamba_d_state", default=256),
            "ssm.time_step_rank": heads,
            "ssm.group_count": self.n_groups,
        }

    def view(self, target: str, source: str) -> View | None:
        return mamba2_view(target, self.n_groups) or super().view(target, source)

    def change(self, target: str) -> Change | None:
        return mamba2_change(target) or super().change(target)


class GraniteHybridMoe(GraniteHybrid, GraniteMoeShared):
    """Layers of Mamba-2, experts beside a shared one."""

    arch = "granitehybrid"
    modules: ClassVar[Modules] = {**GraniteMoeShared.modules, **mamba2("mamba")}
