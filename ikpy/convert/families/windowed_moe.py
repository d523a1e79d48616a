"""Mixtures of experts with windows in three of four layers: K-EXAONE (exaone-moe) and Trinity (afmoe)."""

from __future__ import annotations

from typing import ClassVar

from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    SELECTION_BIAS,
    SHARED,
    Keys,
    Modules,
    WindowFamily,
    group_note,
    routing_keys,
)
from ikpy.convert.families.prediction import APART


class _WindowedMoe(WindowFamily):
    """Leading dense layers, routed and shared experts; full layers do not know positions."""

    def check(self) -> None:
        super().check()
        rope = self.config.rope()["rope_type"]
        self.config.require(f"RoPE scaling '{rope}'", rope in ("default", "llama3"))

    def keys(self) -> Keys:
        return super().keys() | routing_keys(self.config, gating=2)

    def notes(self) -> list[str]:
        return group_note(self.config)


class ExaoneMoe(_WindowedMoe):
    """K-EXAONE."""

    arch = "exaone-moe"
    prediction_modules: ClassVar[Modules] = APART
    rope_scalings = ("llama3",)
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **DENSE,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED,
        "mlp.e_score_correction_bias": "exp_probs_b.bias",
    }


class Afmoe(_WindowedMoe):
    """Trinity: a gate for every element of what was attended to, norms around both branches."""

    arch = "afmoe"
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **DENSE,
        **EXPERTS,
        **SHARED,
        "self_attn.gate_proj": "attn_gate",
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.router.gate": "ffn_gate_inp",
        "mlp.expert_bias": "exp_probs_b.bias",
    }

    def check(self) -> None:
        super().check()
        scaled = bool(self.config.get("mup_enabled", default=False))
        self.config.require("mup_enabled false: embeddings are not scaled", scaled)

    def keys(self) -> Keys:
        config = self.config
        return super().keys() | {
            "leading_dense_block_count": config.integer("num_dense_layers", default=0),
            "expert_weights_scale": config.number("route_scale", default=1.0),
            "expert_weights_norm": bool(config.get("route_norm", default=True)),
        }
