"""Qwen 2 and 3, dense and with experts; Mellum 2, GroveMoE."""

from __future__ import annotations

from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    QKV,
    Family,
    Keys,
    Modules,
    feed_forward,
)
from ikpy.convert.rope import dynamic_notes


class Qwen2(Family):
    """Biases of q, k and v; the sliding window of some configurations is switched off in all published models."""

    arch = "qwen2"
    biases = needed_biases = QKV
    rope_scalings: ClassVar[tuple[str, ...]] = ("dynamic",)  # of InternVL

    def check(self) -> None:
        super().check()
        self.config.require("use_sliding_window true", not self.config.get("use_sliding_window", default=False))

    def notes(self) -> list[str]:
        return dynamic_notes(self.config)


class _QwenMoe(Qwen2):
    """Experts in every layer, renormalised or not as the architecture has it."""

    normalizes = True
    normalizes_by_default = False  # where the configuration does not say

    def check(self) -> None:
        super().check()
        config = self.config
        sparse = config.integer("decoder_sparse_step", default=1) == 1 and not config.get("mlp_only_layers", default=[])
        config.require("dense layers among the expert layers", sparse)
        norm = bool(config.get("norm_topk_prob", default=self.normalizes_by_default))
        config.require(f"norm_topk_prob {norm}", norm == self.normalizes)

    def keys(self) -> Keys:
        return super().keys() | {"expert_feed_forward_length": self.config.integer("moe_intermediate_size")}


class Qwen2Moe(_QwenMoe):
    """A shared expert behind a sigmoid gate."""

    arch = "qwen2moe"
    normalizes = False
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **EXPERTS,
        **feed_forward("mlp.shared_expert", "_shexp"),
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }

    def keys(self) -> Keys:
        width = self.config.integer("shared_expert_intermediate_size")
        return super().keys() | {"expert_shared_feed_forward_length": width}


class Qwen3(Qwen2):
    """Norms of every query and key head."""

    arch = "qwen3"
    biases = needed_biases = frozenset()
    modules: ClassVar[Modules] = {**ATTENTION, **HEAD_NORMS, **DENSE}


class Qwen3Moe(_QwenMoe):
    """Qwen 3 attention with experts."""

    arch = "qwen3moe"
    biases = needed_biases = frozenset()
    modules: ClassVar[Modules] = {**ATTENTION, **HEAD_NORMS, **EXPERTS}


_GROUP_SIZE, _GROUP_WIDTH, _GROUP_SCALE = 2, 128, 0.05
"""Of GroveMoE, whose configuration does not say them."""


class GroveMoe(Qwen3Moe):
    """Groups of experts with a small one that they share; a bias of the choice that no model uses is left out."""

    arch = "grovemoe"
    needs_output = True
    unused = frozenset({"mlp.expert_bias"})
    modules: ClassVar[Modules] = {**Qwen3Moe.modules, **feed_forward("mlp.chunk_experts.{e}", "_chexps")}
    normalizes_by_default = True

    def n_parts(self, target: str) -> int:
        return self.n_expert // _GROUP_SIZE if target.endswith("_chexps") else self.n_expert

    def keys(self) -> Keys:
        return super().keys() | {
            "experts_per_group": _GROUP_SIZE,
            "expert_chunk_feed_forward_length": _GROUP_WIDTH,
            "expert_group_scale": _GROUP_SCALE,
        }


class Mellum(Qwen3Moe):
    """Windows in the layers that the configuration lists; RoPE of full layers may be stretched."""

    arch = "mellum"
    has_windows = True
    needs_output = True
    normalizes_by_default = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.get("rope_parameters", default=None) is None:
            bases = {"full_attention": 500000.0, "sliding_attention": 10000.0}
            config.values["rope_parameters"] = {kind: {"rope_theta": base} for kind, base in bases.items()}
        # Of no meaning beside a list, but some configurations have it.
        uses_windows = config.values.pop("use_sliding_window", None)
        config.require("use_sliding_window false", uses_windows is not False or not any(self.has_window))

    @property
    def has_window(self) -> list[bool]:
        """Whether each layer attends to a window."""
        return self.config.sliding_layers() or [False] * self.config.n_layer

    def check(self) -> None:
        super().check()
        config = self.config
        kinds = config.get("mlp_layer_types", default=["sparse"])
        config.require("dense layers among the expert layers", set(kinds) == {"sparse"})
        listed = len(self.has_window)
        config.require(f"{listed} kinds of attention", listed == config.n_layer)
        for kind, present in (("sliding_attention", True), ("full_attention", False)):
            if present not in self.has_window:
                continue
            rope = config.rope(kind)
            fraction = float(rope.get("partial_rotary_factor") or 1)
            config.require(f"partial_rotary_factor {fraction:g}", fraction == 1)
            scaled = present and rope["rope_type"] != "default"
            config.require(f"RoPE scaling '{rope['rope_type']}' of the window layers", not scaled)

    def keys(self) -> Keys:
        keys = super().keys()
        if not any(self.has_window):
            return keys
        return keys | {
            "attention.sliding_window": self.config.integer("sliding_window"),
            "attention.sliding_window_pattern": self.has_window,
            "rope.freq_base_swa": float(self.config.rope("sliding_attention")["rope_theta"]),
        }
