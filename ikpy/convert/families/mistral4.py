"""Mistral Small 4: latent attention whose queries have a temperature, routed and shared experts (mistral4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys, Modules, View, expert_half
from ikpy.convert.families.deepseek import DeepSeekV2


class Mistral4(DeepSeekV2):
    """Softmax routing with renormalised weights; the experts of a layer are stored together."""

    arch = "mistral4"
    usual_pre = "tekken"
    defaults: ClassVar[Mapping[str, int | float]] = {"norm_topk_prob": True, "first_k_dense_replace": 0}
    modules: ClassVar[Modules] = {
        **DeepSeekV2.modules,
        "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "mlp.experts.down_proj": "ffn_down_exps",
    }

    def keys(self) -> Keys:
        rope, keys = self.config.rope(), super().keys()
        if temperature := float(rope.get("llama_4_scaling_beta") or 0.0):
            keys["attention.temperature_scale"] = temperature
            keys["attention.temperature_length"] = int(rope["original_max_position_embeddings"])
        return keys

    def view(self, target: str, source: str) -> View | None:
        return expert_half(target) if source == "mlp.experts.gate_up_proj" else super().view(target, source)
