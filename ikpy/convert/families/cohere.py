"""Command R, Command R7B and A (cohere2), Command A+ (cohere2moe)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.families.base import ATTENTION, DENSE, EXPERTS, HEAD_NORMS, SHARED, Family, Keys, Modules
from ikpy.convert.families.prediction import BEHIND

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
    drops_zero_biases = True
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


_GATINGS = {"softmax": 3, "sigmoid": 2}  # softmax: over the chosen experts


class Cohere2Moe(CommandR):
    """Leading dense layers of their own width, then routed and shared experts; the file says which layers have a
    window.
    """

    arch = "cohere2moe"
    prediction_modules: ClassVar[Modules] = BEHIND
    drops_zero_biases = True
    has_output = True
    has_windows = True
    defaults: ClassVar[Mapping[str, int | float]] = {
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 4096,
    }
    modules: ClassVar[Modules] = {**ATTENTION, **DENSE, **EXPERTS, **SHARED}

    @property
    def is_dense(self) -> list[bool]:
        """Whether each layer is without experts."""
        config = self.config
        kinds = config.get("mlp_layer_types", default=None)
        config.require(f"{len(kinds or [])} kinds of networks", kinds is None or len(kinds) == config.n_layer)
        n_dense = config.integer("first_k_dense_replace", default=0)
        return [il < n_dense if kinds is None else kinds[il] == "dense" for il in range(config.n_layer)]

    @property
    def window_layers(self) -> list[bool]:
        """Whether each layer attends to a window; dense layers and the others take turns of their own."""
        config, listed = self.config, self.config.sliding_layers()
        if listed is not None:
            return listed
        n_dense = config.integer("first_k_dense_replace", default=0)
        ahead = config.integer("prefix_dense_sliding_window_pattern", default=1)
        period = config.integer("sliding_window_pattern", default=4)
        dense = [(il + 1) % ahead != 0 for il in range(n_dense)]
        return dense + [(il + 1) % period != 0 for il in range(config.n_layer - n_dense)]

    def check(self) -> None:
        Family.check(self)
        config, dense = self.config, self.is_dense
        config.require("dense layers among the expert layers", all(dense[: sum(dense)]))
        rotated = config.integer("prefix_dense_sliding_window_pattern", default=1) == 1
        full = any(d and not window for d, window in zip(dense, self.window_layers, strict=True))
        config.require("a dense layer without window and without positions", rotated or not full)
        kind = config.get("expert_selection_fn", default="softmax")
        config.require(f"expert_selection_fn '{kind}'", kind in _GATINGS)
        joined = config.get("shared_expert_combination_strategy", default="average")
        has_shared = config.integer("num_shared_experts", default=0) > 0
        config.require(f"shared_expert_combination_strategy '{joined}'", joined == "average" or not has_shared)

    def keys(self) -> Keys:
        config, width = self.config, self.config.integer("intermediate_size")
        n_shared = config.integer("num_shared_experts", default=0)
        keys = super().keys() | {
            "feed_forward_length": config.integer("prefix_dense_intermediate_size", default=width),
            "leading_dense_block_count": sum(self.is_dense),
            "expert_feed_forward_length": width,
            "expert_gating_func": _GATINGS[config.get("expert_selection_fn", default="softmax")],
            "expert_weights_norm": bool(config.get("norm_topk_prob", default=True)),
            "attention.sliding_window": config.integer("sliding_window"),
            "attention.sliding_window_pattern": self.window_layers,
        }
        if n_shared:
            keys |= {"expert_shared_count": n_shared, "expert_shared_feed_forward_length": n_shared * width}
        if config.get("rms_norm_eps", default=None) is not None:
            keys["attention.layer_norm_rms_epsilon"] = keys.pop(self.norm_key)
        return keys
