"""GLM-5.3 Flash (glm5-next), its text model: delta attention with bounded decays beside sparse latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys, Modules, View, flat
from ikpy.convert.families.deepseek import INDEXER, DeepSeekV3, full_indexers, indexer_keys
from ikpy.convert.families.deepseek4 import streams
from ikpy.convert.families.kimi_linear import KDA, KimiLinear
from ikpy.convert.families.prediction import BEHIND

_ATTENDS = ("indexed_attention", "full_attention")
_PERIOD = 4  # of layers that attend, where the configuration lists none
_N_DENSE = 3  # layers without experts, where it does not say
_LOWER_BOUND = -5.0


class Glm5Next(KimiLinear):
    """As Kimi Linear, with indexers and residual streams."""

    arch = "glm5-next"
    prediction_modules: ClassVar[Modules] = BEHIND
    usual_pre = "glm4"
    bounds_decays = True
    biases = needed_biases = frozenset({"indexer.k_norm"})
    defaults: ClassVar[Mapping[str, int | float]] = {
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "index_head_dim": 128,
        "index_kpool": 16,
        "index_n_heads": 32,
        "index_topk": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "qk_rope_head_dim": 0,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
    }
    modules: ClassVar[Modules] = {
        **DeepSeekV3.modules,
        "self_attn.kv_b_proj": ("attn_k_b", "attn_v_b"),
        **KDA,
        **INDEXER,
        "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate",
        "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape",
        **streams("hc_attn", "hc_attn", "_"),
        **streams("hc_ffn", "hc_ffn", "_"),
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.get("mlp_layer_types", "first_k_dense_replace", default=None) is None:
            config.values["first_k_dense_replace"] = min(_N_DENSE, config.n_layer)

    @property
    def attends(self) -> list[bool]:
        config = self.config
        kinds = config.get("layer_types", default=None)
        if kinds is None:
            return [il % _PERIOD == _PERIOD - 1 for il in range(config.n_layer)]
        config.require(f"{len(kinds)} kinds of layers", len(kinds) == config.n_layer)
        config.require("another kind of layers", set(kinds) <= {"linear_attention", *_ATTENDS})
        return [kind in _ATTENDS for kind in kinds]

    @property
    def linear(self) -> Config:
        """With the bound of decays, which some configurations name otherwise or leave out."""
        linear, values = super().linear, self.config.values
        bound = values.get("linear_lower_bound", _LOWER_BOUND)
        if bound is not None:
            bound = self.config.number("linear_lower_bound", default=_LOWER_BOUND)
        if nested := values.get("linear_attn_config"):
            bound = nested.get("gate_lower_bound", bound)
            if bound is None and nested.get("safe_gate", True):
                bound = _LOWER_BOUND
        return Config({**linear.values, "gate_lower_bound": bound}, linear.path)

    def check(self) -> None:
        super().check()
        config = self.config
        config.require(f"qk_rope_head_dim {self.n_rot}", self.n_rot == 0)
        config.require(f"{self.n_head_kv} KV heads of {self.n_head}", self.n_head_kv == self.n_head)
        tail = bool(config.get("index_kpool_always_select_tail", default=True))
        config.require("index_kpool_always_select_tail false", tail)
        config.require("no q_lora_rank", config.get("q_lora_rank", default=None) is not None)

    def keys(self) -> Keys:
        config = self.config
        limits = [config.number("swiglu_limit")] * config.n_layer
        attends, full = self.attends, full_indexers(config)
        keys = super().keys() | {
            **indexer_keys(config),
            "attention.indexer.kpool": config.integer("index_kpool"),
            "attention.indexer.kpool_select_tail": True,
            "swiglu_clamp_exp": limits,
            "swiglu_clamp_shexp": limits,
            "hyper_connection.count": config.integer("hc_mult"),
            "hyper_connection.sinkhorn_iterations": config.integer("hc_sinkhorn_iters"),
            "hyper_connection.epsilon": config.epsilon("hc_eps"),
        }
        if not all(full[il] for il in range(config.n_layer) if attends[il]):
            keys["attention.indexer.types"] = full
        return keys

    def prediction_lists(self) -> Mapping[str, list[Any]]:
        limits = [self.config.number("swiglu_limit")] * self.n_predict
        return {
            "attention.head_count_kv": [1] * self.n_predict,
            "swiglu_clamp_exp": limits,
            "swiglu_clamp_shexp": limits,
        }

    def view(self, target: str, source: str) -> View | None:
        return flat if target == "ssm_a" else super().view(target, source)
