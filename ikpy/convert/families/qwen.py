"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from typing import ClassVar

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


class Qwen2(Family):
    """Biases of q, k and v; the sliding window of some configurations is switched off in all published models."""

    arch = "qwen2"
    biases = needed_biases = QKV

    def check(self) -> None:
        super().check()
        self.config.require("use_sliding_window true", not self.config.get("use_sliding_window", default=False))


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
