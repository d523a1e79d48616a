"""Kimi Linear: delta attention with a decay per channel between layers of latent attention (arXiv:2510.26692)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    DENSE,
    MIXTRAL_EXPERTS,
    Change,
    Keys,
    Modules,
    Targets,
    View,
    decay_rates,
    feed_forward,
)
from ikpy.convert.families.deepseek import DeepSeekV3

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


class KimiLinear(DeepSeekV3):
    """As files of llama.cpp: layers that attend have one KV head of latents, and attn_kv_b in two parts only."""

    arch = "kimi-linear"
    needs_output = False
    usual_pre = "kimi-k2"
    bounds_decays: ClassVar[bool] = False
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
        bound = self.decay_bound
        config.require(f"gate_lower_bound {bound}", bound is None or self.bounds_decays)

    @property
    def decay_bound(self) -> float | None:
        """Of the logarithms of decays, if there is one."""
        bound = self.linear.get("gate_lower_bound", default=None)
        return None if bound is None else self.linear.number("gate_lower_bound")

    def keys(self) -> Keys:
        keys, rank = super().keys(), self.config.integer("kv_lora_rank")
        return keys | {
            "attention.head_count_kv": [int(attends) for attends in self.attends],
            "attention.key_length_mla": keys["attention.key_length"],
            "attention.value_length_mla": keys["attention.value_length"],
            "attention.key_length": rank + self.n_rot,
            "attention.value_length": rank,
            "ssm.conv_kernel": self.linear.integer("short_conv_kernel_size"),
            "kda.head_dim": self.linear.integer("head_dim"),
        }

    def view(self, target: str, source: str) -> View | None:
        if target in ("attn_k_b", "attn_v_b"):
            n_rows = self.config.integer("kv_lora_rank" if target == "attn_k_b" else "v_head_dim")
            return self._per_head(super().view(target, source), n_rows)
        if target.startswith("ssm_conv1d"):
            return lambda taps: taps.reshape(taps.shape[0], 1, -1)
        if target == "ssm_a":
            return lambda logarithms: logarithms.reshape(-1, 1)
        return super().view(target, source)

    def _per_head(self, view: View | None, n_rows: int) -> View:
        """A view with a matrix of so many rows per head."""
        assert view is not None
        return lambda values: view(values).reshape(self.n_head, n_rows, -1)

    def change(self, target: str) -> Change | None:
        return decay_rates if target == "ssm_a" else super().change(target)
