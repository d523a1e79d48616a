"""Kimi Linear: delta attention with a decay per channel between layers of latent attention (arXiv:2510.26692)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    DENSE,
    MIXTRAL_EXPERTS,
    Change,
    Family,
    Keys,
    Modules,
    Targets,
    View,
    decay_rates,
    feed_forward,
)
from ikpy.convert.families.deepseek import DeepSeekV3, LatentHead

# Names of the published configuration -> those of its relatives.
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
}


KDA: dict[str, Targets] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_conv1d": "ssm_conv1d_q",
    "self_attn.k_conv1d": "ssm_conv1d_k",
    "self_attn.v_conv1d": "ssm_conv1d_v",
    "self_attn.f_a_proj": "ssm_f_a",
    "self_attn.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.o_norm": "ssm_norm",
}


class KimiLinear(LatentHead, DeepSeekV3):
    """Recurrent layers have no KV heads."""

    arch = "kimi-linear"
    prediction_modules: ClassVar[Modules] = {}
    needs_output = False
    usual_pre = "kimi-k2"
    bounds_decays: ClassVar[bool] = False
    """Whether the architecture has a lower bound of the logarithms of decays."""
    defaults: ClassVar[Mapping[str, int | float]] = {"norm_topk_prob": True}
    modules: ClassVar[Modules] = {
        **{name: target for name, target in DeepSeekV3.modules.items() if not name.startswith("mlp.")},
        **DENSE,
        **feed_forward("block_sparse_moe"),  # of dense layers, as transformers saves them
        **MIXTRAL_EXPERTS,
        **feed_forward("block_sparse_moe.shared_experts", "_shexp"),
        "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
        "self_attn.kv_b_proj": ("attn_k_b", "attn_v_b"),
        **KDA,
    }

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        from ikpy.convert.families.kimi_k3 import KimiK3

        return cls if config.get("attn_res_block_size", default=None) is None else KimiK3

    def __init__(self, config: Config) -> None:
        values = config.values
        config.values = {new: values[old] for old, new in _NAMES.items() if old in values} | values
        super().__init__(config)

    @property
    def linear(self) -> Config:
        """The configuration of the KDA layers."""
        values = self.config.get("linear_attn_config", default={})
        names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        own = {name: self.config.get(other, default=None) for name, other in names.items()}
        return Config({**own, **values}, self.config.path)

    @property
    def attends(self) -> list[bool]:
        """Whether each layer attends; published configurations count layers from 1."""
        kinds = self.config.get("layer_types", default=None)
        if kinds is not None:
            self.config.require(f"{len(kinds)} kinds of layers", len(kinds) == self.config.n_layer)
            return [kind == "full_attention" for kind in kinds]
        numbers = self.linear.get("full_attn_layers")
        return [il + 1 in numbers for il in range(self.config.n_layer)]

    def check(self) -> None:
        super().check()
        config, linear = self.config, self.linear
        config.require("mla_use_nope false", bool(config.get("mla_use_nope", default=True)))
        config.require("moe_layer_freq above 1", config.integer("moe_layer_freq", default=1) == 1)
        heads = linear.integer("num_heads")
        config.require(f"{heads} heads of KDA layers beside {self.n_head} others", heads == self.n_head)
        bound = linear.get("gate_lower_bound", default=None)
        possible = self.bounds_decays and isinstance(bound, int | float) and bound < 0
        config.require(f"gate_lower_bound {bound}", bound is None or possible)

    def keys(self) -> Keys:
        linear = self.linear
        keys = super().keys() | {
            "attention.head_count_kv": [int(attends) for attends in self.attends],
            "ssm.conv_kernel": linear.integer("short_conv_kernel_size"),
            "kda.head_dim": linear.integer("head_dim"),
        }
        if self.bounds_decays and linear.get("gate_lower_bound", default=None) is not None:
            keys["kda.gate_lower_bound"] = linear.number("gate_lower_bound")
        return keys

    def view(self, target: str, source: str) -> View | None:
        if target.startswith("ssm_conv1d"):
            return lambda taps: taps.reshape(taps.shape[0], 1, -1)
        if target == "ssm_a":
            return lambda logarithms: logarithms.reshape(-1, 1)
        return super().view(target, source)

    def change(self, target: str) -> Change | None:
        return decay_rates if target == "ssm_a" else super().change(target)
