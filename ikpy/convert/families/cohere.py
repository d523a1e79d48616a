"""Command R and Command R7B (cohere2)."""

from __future__ import annotations

from typing import ClassVar

from ikpy.convert.families.base import ATTENTION, DENSE, HEAD_NORMS, Family, Keys, Modules

_LAYERS_WITH_HEAD_NORMS = 64


class CommandR(Family):
    """One norm for both branches; adjacent pairs already."""

    arch = "command-r"
    has_output = False
    norm_key = "attention.layer_norm_epsilon"
    modules: ClassVar[Modules] = {**ATTENTION, **HEAD_NORMS, **DENSE}

    def check(self) -> None:
        super().check()
        norms = bool(self.config.get("use_qk_norm", default=False))
        n_layer = self.config.n_layer
        is_known = norms == (n_layer >= _LAYERS_WITH_HEAD_NORMS)
        self.config.require(f"use_qk_norm {norms} with {n_layer} layers", is_known)

    def keys(self) -> Keys:
        return super().keys() | {"logit_scale": self.config.number("logit_scale", default=0.0625)}


class Cohere2(CommandR):
    """Three rotated window layers for every full one without RoPE."""

    arch = "cohere2"
    has_windows = True
    modules: ClassVar[Modules] = {**ATTENTION, **DENSE}

    def check(self) -> None:
        Family.check(self)
        layers = self.config.sliding_layers()
        expected = [(il + 1) % 4 != 0 for il in range(self.config.n_layer)]
        self.config.require("another order of window layers", layers is None or layers == expected)
        pattern = self.config.integer("sliding_window_pattern", default=4)
        self.config.require(f"sliding_window_pattern {pattern}", layers is not None or pattern == 4)

    def keys(self) -> Keys:
        return super().keys() | {"attention.sliding_window": self.config.integer("sliding_window")}
