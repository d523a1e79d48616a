"""Kimi K3: Kimi Linear with attention residuals, latent experts and factors bounded by tanh (kimi-k3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys, Modules, Targets, View, flat
from ikpy.convert.families.kimi_linear import KimiLinear

_GATE = "self_attn.g_proj"
_SCORES = ("attn_res_score", "ffn_res_score", "output_res_score")
# Values of a configuration that the architecture takes for granted.
_ALWAYS = ("mla_use_output_gate", "latent_moe_use_norm")


class KimiK3(KimiLinear):
    """As files of llama.cpp: a score is the product of a norm's weight and a projection."""

    arch = "kimi-k3"
    needs_output = True
    bounds_decays = True
    activations = ("situ",)
    outer: ClassVar[Mapping[str, str]] = {**KimiLinear.outer, "model.output_attn_res_proj": "output_res_score"}
    factors: ClassVar[Mapping[str, str]] = {
        "self_attention_res_norm": "attn_res_score",
        "mlp_res_norm": "ffn_res_score",
        "model.output_attn_res_norm": "output_res_score",
    }
    modules: ClassVar[Modules] = {
        **{name: target for name, target in KimiLinear.modules.items() if not name.startswith("self_attn.g_")},
        _GATE: ("attn_gate", "ssm_g"),
        "self_attention_res_proj": "attn_res_score",
        "mlp_res_proj": "ffn_res_score",
        "block_sparse_moe.routed_expert_down_proj": "ffn_routed_down",
        "block_sparse_moe.routed_expert_up_proj": "ffn_routed_up",
        "block_sparse_moe.routed_expert_norm": "ffn_routed_norm",
    }

    def check(self) -> None:
        super().check()
        for name in _ALWAYS:
            self.config.require(f"{name} false", bool(self.config.get(name, default=True)))
        full_rank = bool(self.linear.get("use_full_rank_gate", default=True))
        self.config.require("use_full_rank_gate false", full_rank)

    def keys(self) -> Keys:
        config = self.config
        keys = super().keys() | {
            "attn_res.block_size": config.integer("attn_res_block_size"),
            "activation.situ_beta": config.number("activation_situ_beta"),
            "activation.situ_linear_beta": config.number("activation_situ_linear_beta", default=0.0),
        }
        if config.get("routed_expert_hidden_size", default=None):
            keys["expert_latent_length"] = config.integer("routed_expert_hidden_size")
        return keys

    def targets(self, module: str, layer: int) -> Targets | None:
        if module == _GATE:
            return "attn_gate" if self.attends[layer] else "ssm_g"
        return super().targets(module, layer)

    def view(self, target: str, source: str) -> View | None:
        if target in _SCORES:
            return flat
        if target == "ssm_a":  # which the checkpoint pads
            return lambda logarithms: logarithms.reshape(-1)[: self.n_head]
        return super().view(target, source)
