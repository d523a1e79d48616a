"""Tencent Hy3: leading dense layers, sigmoid-routed and shared experts (hy_v3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    BARE,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    SHARED,
    Family,
    Keys,
    Modules,
    View,
    expert_half,
    feed_forward,
    routing_keys,
)
from ikpy.convert.families.prediction import BEHIND


class HyV3(Family):
    """Names of the published checkpoints (`mlp.router.gate`, `mlp.shared_mlp`) and those of transformers."""

    arch = "hy_v3"
    prediction_modules: ClassVar[Modules] = {**BEHIND, "final_layernorm": "nextn.shared_head_norm"}
    bare = BARE | {"exp_probs_b"}  # as in files of llama.cpp
    defaults: ClassVar[Mapping[str, int | float]] = {"rope_theta": 11158840.0}
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **DENSE,
        **EXPERTS,
        **SHARED,
        **feed_forward("mlp.shared_mlp", "_shexp"),
        "mlp.router.gate": "ffn_gate_inp",
        "mlp.expert_bias": "exp_probs_b",
        "mlp.e_score_correction_bias": "exp_probs_b",
        "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "mlp.experts.down_proj": "ffn_down_exps",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if "mlp_layer_types" not in config.values:
            config.values.setdefault("first_k_dense_replace", 1)
        self.n_shared = config.integer("num_shared_experts", default=1)

    def check(self) -> None:
        super().check()
        for name in ("qk_norm", "moe_router_use_sigmoid"):
            self.config.require(f"{name} false", bool(self.config.get(name, default=True)))
        self.config.require(f"num_shared_experts {self.n_shared}", self.n_shared > 0)

    def keys(self) -> Keys:
        config = self.config
        width = config.integer("moe_intermediate_size", "expert_hidden_dim")
        return (
            super().keys()
            | routing_keys(config, gating=2)
            | {
                "expert_shared_count": self.n_shared,
                "expert_feed_forward_length": width,
                "expert_shared_feed_forward_length": width * self.n_shared,
                "expert_weights_scale": config.number("router_scaling_factor", default=1.0),
                "expert_weights_norm": bool(config.get("route_norm", default=True)),
            }
        )

    def view(self, target: str, source: str) -> View | None:
        return expert_half(target) if source == "mlp.experts.gate_up_proj" else super().view(target, source)
