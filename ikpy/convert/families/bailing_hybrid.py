"""Ling 3.0: delta attention whose decay is bounded, between layers of gated latent attention (bailingmoe3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import EXPERTS, SHARED, Change, Keys, Modules, Targets
from ikpy.convert.families.kimi_linear import KimiLinear
from ikpy.convert.families.prediction import WITH_LAYER_NORM

_GATE = "attention.g_proj"
_LIMITS = ("expert", "swiglu_clamp_exp"), ("share_expert", "swiglu_clamp_shexp")
"""Lists of bounds in the configuration, and their keys."""
# Values of a configuration that the architecture takes for granted.
_ALWAYS: Mapping[str, object] = {
    "gated_attention_proj_granularity_type": "head_wise",
    "kda_safe_gate": True,
    "linear_silu": True,
    "no_kda_lora": True,
    "scale_router_input": False,
    "up_proj_norm": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qk_norm": True,
    "value_norm": False,
}


class BailingHybrid(KimiLinear):
    """As files of llama.cpp, which applies the bounds of SwiGLU that transformers leaves out."""

    arch = "bailingmoe3"
    prediction_modules: ClassVar[Modules] = {**WITH_LAYER_NORM, _GATE: "attn_gate"}
    usual_pre = "bailingmoe2"
    defaults: ClassVar[Mapping[str, int | float]] = {"norm_topk_prob": True, "rope_theta": 6e6}
    outer: ClassVar[Mapping[str, str]] = {
        "model.word_embeddings": "token_embd",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        **{
            name.replace("self_attn.", "attention."): target
            for name, target in KimiLinear.modules.items()
            if not name.startswith(("block_sparse_moe.", "self_attn.f_", "self_attn.g_"))
        },
        **EXPERTS,
        **SHARED,
        "mlp.gate.expert_bias": "exp_probs_b.bias",
        "attention.dense": "attn_output",
        "attention.f_proj": "ssm_f_a",
        _GATE: ("attn_gate", "ssm_g_a"),
    }

    @property
    def linear(self) -> Config:
        config = self.config
        names = ("linear_head_dim", "head_dim"), ("short_conv_kernel_size", "linear_conv_kernel_dim")
        (head_dim, taps), heads = names, self.n_head
        return Config(
            {
                "head_dim": config.integer(*head_dim),
                "num_heads": heads,
                "short_conv_kernel_size": config.integer(*taps, default=4),
            },
            config.path,
        )

    @property
    def attends(self) -> list[bool]:
        """Whether each layer attends: the last one of every group, and those behind the last whole group."""
        if self.config.get("layer_types", default=None) is not None:
            return super().attends
        size, n_layer = self.config.integer("layer_group_size"), self.config.n_layer
        self.config.require(f"layer_group_size {size}", size > 0)
        return [(il + 1) % size == 0 or il >= n_layer // size * size for il in range(n_layer)]

    def check(self) -> None:
        config = self.config
        classes = config.get("architectures", default=[])
        is_older = isinstance(classes, list) and any(str(name).startswith("BailingMoeV2") for name in classes)
        config.require("layers of Ling 2.5, another linear attention", not is_older)
        for name, usual in _ALWAYS.items():
            value = config.get(name, default=usual)
            config.require(f"{name} {value}", value == usual)
        kind = config.rope()["rope_type"]
        config.require(f"RoPE scaling '{kind}'", kind == "default")
        bound = config.number("kda_lower_bound", default=-5.0)
        config.require(f"kda_lower_bound {bound:g}", bound < 0)
        super().check()

    def keys(self) -> Keys:
        keys, config = super().keys(), self.config
        width = config.integer("moe_intermediate_size") * config.integer("n_shared_experts", "num_shared_experts")
        keys |= {
            "kda.safe_gate": True,
            "kda.gate_lower_bound": config.number("kda_lower_bound", default=-5.0),
            "expert_shared_feed_forward_length": config.integer("moe_shared_expert_intermediate_size", default=width),
        }
        for name, key in _LIMITS:
            if config.get(f"{name}_swiglu_limit_list", default=None) is not None:
                keys[key] = self._limits(f"{name}_swiglu_limit_list")[: config.n_layer]
        return keys

    def prediction_lists(self) -> Mapping[str, list[Any]]:
        start = self.config.n_layer
        lists: dict[str, list[Any]] = {"attention.head_count_kv": [1] * self.n_predict}
        for name, key in _LIMITS:
            if self.config.get(f"{name}_swiglu_limit_list", default=None) is not None:
                limits = [*self._limits(f"{name}_swiglu_limit_list"), *[0.0] * self.n_predict]
                lists[key] = limits[start : start + self.n_predict]
        return lists

    def _limits(self, name: str) -> list[float]:
        """Bounds of the layers, 0 for none; prediction layers may be listed as well."""
        values, n_layer = self.config.get(name), self.config.n_layer
        numbers = [0 if value is None else value for value in values] if isinstance(values, list) else []
        is_list = len(numbers) >= n_layer and all(isinstance(n, int | float) and n >= 0 for n in numbers)
        self.config.require(f"{name} {values!r} of {n_layer} layers", is_list)
        return [float(n) for n in numbers]

    def targets(self, module: str, layer: int) -> Targets | None:
        if module == _GATE:
            return "attn_gate" if self.attends[layer] else "ssm_g_a"
        return super().targets(module, layer)

    def change(self, target: str) -> Change | None:
        return np.exp if target == "ssm_a" else super().change(target)

    def notes(self) -> list[str]:
        return []
