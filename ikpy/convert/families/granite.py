"""Granite 3 and 4, dense and with experts."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import (
    ATTENTION,
    Keys,
    Modules,
    View,
)
from ikpy.convert.families.llama import Llama


class Granite(Llama):
    """Scaled embeddings, branches, scores and logits."""

    arch = "granite"

    def keys(self) -> Keys:
        config = self.config
        return super().keys() | {
            "embedding_scale": config.number("embedding_multiplier", default=1.0),
            "residual_scale": config.number("residual_multiplier", default=1.0),
            "attention.scale": config.number("attention_multiplier", default=1.0),
            "logit_scale": config.number("logits_scaling", default=1.0),
        }


class GraniteMoe(Granite):
    """Gate and up of all experts in one tensor [E, 2F, D]."""

    arch = "granitemoe"
    modules: ClassVar[Modules] = {
        **ATTENTION,
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
        "block_sparse_moe.output_linear": "ffn_down_exps",
    }

    def view(self, target: str, source: str) -> View | None:
        if source.endswith("input_linear"):
            return lambda values: np.split(values, 2, axis=1)[target == "ffn_up_exps"]
        return super().view(target, source)
