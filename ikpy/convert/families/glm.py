"""GLM-4 and GLM-4.5/4.6 (glm4moe)."""

from __future__ import annotations

from typing import ClassVar

from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    QKV,
    SELECTION_BIAS,
    SHARED,
    Family,
    Keys,
    Modules,
    group_note,
    routing_keys,
)


class Glm4(Family):
    """Norms before and after both branches; half of each head is rotated, in adjacent pairs."""

    arch = "glm4"
    biases = QKV
    rotates_part = True
    rotary_fraction = 0.5
    modules: ClassVar[Modules] = {
        **ATTENTION,
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }


class Glm4Moe(Family):
    """Leading dense layers, sigmoid routing with a selection bias."""

    arch = "glm4moe"
    biases = needed_biases = QKV
    rotates_part = True
    rotary_fraction = 0.5
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **DENSE,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED,
        "post_attention_layernorm": "post_attention_norm",
    }

    def keys(self) -> Keys:
        return super().keys() | routing_keys(self.config, gating=2)

    def notes(self) -> list[str]:
        return group_note(self.config)
