"""DBRX, Arctic, SmallThinker and Grok-1 (experts), OpenELM (layers that differ) and PLM (latent attention)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, MIXTRAL_EXPERTS, Family, Keys, Modules, View
from ikpy.models import grok


class Dbrx(Family):
    """Experts of a layer in three matrices, those of down the other way round."""

    arch = "dbrx"
    norm_key = "attention.layer_norm_epsilon"
    needs_output = True
    aliases: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "max_seq_len": "max_position_embeddings",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5}
    outer: ClassVar[Mapping[str, str]] = {
        "transformer.wte": "token_embd",
        "transformer.norm_f": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "norm_attn_norm.norm_1": "attn_norm",
        "norm_attn_norm.attn.Wqkv": "attn_qkv",
        "norm_attn_norm.attn.out_proj": "attn_output",
        "norm_attn_norm.norm_2": "attn_output_norm",
        "ffn.router.layer": "ffn_gate_inp",
        "ffn.experts.mlp.w1": "ffn_gate_exps",
        "ffn.experts.mlp.v1": "ffn_up_exps",
        "ffn.experts.mlp.w2": "ffn_down_exps",
    }

    def __init__(self, config: Config) -> None:
        self.attn, self.ffn = (_part(config, name) for name in ("attn_config", "ffn_config"))
        config.values["num_key_value_heads"] = self.attn.integer("kv_n_heads", default=1)
        config.values["rope_theta"] = self.attn.number("rope_theta", default=10000.0)
        config.values["intermediate_size"] = self.ffn.integer("ffn_hidden_size", default=3584)
        config.values["num_experts"] = self.ffn.count("moe_num_experts", default=4)
        config.values["num_experts_per_tok"] = self.ffn.integer("moe_top_k", default=1)
        config.values["hidden_act"] = (self.ffn.get("ffn_act_fn", default=None) or {}).get("name", "silu")
        super().__init__(config)

    def check(self) -> None:
        super().check()
        power = self.ffn.values.get("moe_normalize_expert_weights", 1)
        self.config.require(f"moe_normalize_expert_weights {power}", power == 1)

    def keys(self) -> Keys:
        return super().keys() | {"attention.clamp_kqv": self.attn.number("clip_qkv", default=0.0)}

    def view(self, target: str, source: str) -> View | None:
        if not target.endswith("_exps"):
            return super().view(target, source)

        def view(rows: np.ndarray) -> np.ndarray:
            experts = rows.reshape(self.n_expert, -1, rows.shape[-1])
            return experts.swapaxes(1, 2) if target == "ffn_down_exps" else experts

        return view


def _part(config: Config, name: str) -> Config:
    """An object within the configuration."""
    values = config.get(name, default={})
    config.require(f"{name} {values!r}", isinstance(values, dict))
    return Config(values, config.path)


class Arctic(Family):
    """Experts read what attention reads, under the norm that others have behind it."""

    arch = "arctic"
    rotates_pairs = True
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **MIXTRAL_EXPERTS,
        "residual_layernorm": "ffn_norm",
        "residual_mlp.w1": "ffn_gate",
        "residual_mlp.w2": "ffn_down",
        "residual_mlp.w3": "ffn_up",
        "post_attention_layernorm": "ffn_norm_exps",
    }

    def check(self) -> None:
        super().check()
        config = self.config
        for name in ("parallel_attn_mlp_res", "use_residual"):
            config.require(f"{name} false", bool(config.get(name, default=False)))
        period = config.integer("moe_layer_frequency", default=2)
        config.require(f"moe_layer_frequency {period}", period == 1)
        used = config.integer("num_experts_per_tok", default=1)
        config.require(f"num_experts_per_tok {used}", used > 1)  # one alone keeps its weight


class SmallThinker(Family):
    """A router that reads the residual stream in front of attention."""

    arch = "smallthinker"
    has_windows = True
    activations = ("relu",)
    aliases: ClassVar[Mapping[str, str]] = {
        "moe_ffn_hidden_size": "intermediate_size",
        "moe_num_active_primary_experts": "num_experts_per_tok",
        "moe_num_primary_experts": "num_experts",
    }
    modules: ClassVar[Modules] = {
        **ATTENTION,
        "block_sparse_moe.primary_router": "ffn_gate_inp",
        **{f"block_sparse_moe.experts.{{e}}.{name}": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    }

    @property
    def windows(self) -> list[bool]:
        """Whether each layer has a window."""
        return self._layout("sliding_window_layout", 0)

    def _layout(self, name: str, default: int) -> list[bool]:
        n_layer = self.config.n_layer
        flags = self.config.get(name, default=[default] * n_layer)
        fits = isinstance(flags, list) and len(flags) == n_layer
        self.config.require(f"{name} {flags!r}", fits)
        return [bool(flag) for flag in flags]

    def check(self) -> None:
        super().check()
        config, n_layer = self.config, self.config.n_layer
        windows, rotated = self.windows, self._layout("rope_layout", 1)
        usual = [il % 4 != 0 for il in range(n_layer)]
        config.require(f"sliding_window_layout {windows}", windows == usual or not any(windows))
        config.require(f"rope_layout {rotated}", rotated == (usual if any(windows) else [True] * n_layer))
        config.require("secondary experts", not config.get("moe_enable_secondary_experts", default=False))
        config.require("dense layers", all(self._layout("moe_layer_layout", 1)))
        is_softmax = bool(config.get("moe_primary_router_apply_softmax", default=False))
        norm = bool(config.get("norm_topk_prob", default=True))
        config.require("norm_topk_prob false", norm or is_softmax)

    def keys(self) -> Keys:
        config = self.config
        is_softmax = bool(config.get("moe_primary_router_apply_softmax", default=False))
        keys = super().keys() | {
            "expert_feed_forward_length": config.integer("intermediate_size"),
            "expert_gating_func": 1 if is_softmax else 2,
        }
        if any(self.windows):
            keys["attention.sliding_window"] = config.integer("sliding_window_size")
        return keys


class Grok(Family):
    """Grok-1, in the names of xAI's modules and in those of transformers' kind."""

    arch = "grok"
    activations = ("gelu", "gelu_new", "gelu_pytorch_tanh")
    defaults: ClassVar[Mapping[str, int | float]] = {"rms_norm_eps": 1e-5}
    outer: ClassVar[Mapping[str, str]] = {
        **Family.outer,
        "model.norm.scale": "output_norm",
        "transformer.in_out_embed": "token_embd",
        "transformer.rms_norm": "output_norm",
    }
    modules: ClassVar[Modules] = {
        **{f"attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        "attn.o_proj": "attn_output",
        "pre_attn_norm.scale": "attn_norm",
        "post_attn_norm.scale": "attn_output_norm",
        "pre_moe_norm.scale": "ffn_norm",
        "post_moe_norm.scale": "layer_output_norm",
        "moe_block.gate": "ffn_gate_inp",
        "moe_block.experts.{e}.linear": "ffn_gate_exps",
        "moe_block.experts.{e}.linear_v": "ffn_up_exps",
        "moe_block.experts.{e}.linear_1": "ffn_down_exps",
        **{f"multi_head_attention.{name}": f"attn_{name[0]}" for name in ("query", "key", "value")},
        "multi_head_attention.linear": "attn_output",
        "rms_norm": "attn_norm",
        "rms_norm_1": "attn_output_norm",
        "rms_norm_2": "ffn_norm",
        "rms_norm_3": "layer_output_norm",
        "router": "ffn_gate_inp",
        "moe.{e}.linear": "ffn_gate_exps",
        "moe.{e}.linear_v": "ffn_up_exps",
        "moe.{e}.linear_1": "ffn_down_exps",
    }

    def check(self) -> None:
        super().check()
        self.config.require("residual_moe true", not self.config.get("residual_moe", default=False))

    def keys(self) -> Keys:
        config = self.config
        return super().keys() | {
            "attention.output_scale": config.number("attn_output_multiplier", default=grok.OUTPUT_SCALE),
            "attn_logit_softcapping": config.number("max_attn_value", default=grok.SOFTCAP),
            "embedding_scale": config.number("embedding_multiplier_scale", default=grok.EMBEDDING_SCALE),
            "logit_scale": config.number("output_multiplier_scale", default=grok.LOGIT_SCALE),
        }


class OpenElm(Family):
    """Heads, KV heads and widths are counted layer by layer; gate and up lie in one matrix."""

    arch = "openelm"
    has_output = False
    aliases: ClassVar[Mapping[str, str]] = {
        "activation_fn_name": "hidden_act",
        "max_context_length": "max_position_embeddings",
        "model_dim": "hidden_size",
        "num_transformer_layers": "num_hidden_layers",
        "rope_freq_constant": "rope_theta",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"rms_norm_eps": 1e-6}
    outer: ClassVar[Mapping[str, str]] = {
        "transformer.token_embeddings": "token_embd",
        "transformer.norm": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "attn_norm": "attn_norm",
        "attn.qkv_proj": "attn_qkv",
        "attn.q_norm": "attn_q_norm",
        "attn.k_norm": "attn_k_norm",
        "attn.out_proj": "attn_output",
        "ffn_norm": "ffn_norm",
        "ffn.proj_1": ("ffn_gate", "ffn_up"),
        "ffn.proj_2": "ffn_down",
    }

    def __init__(self, config: Config) -> None:
        config.values.setdefault("intermediate_size", 0)  # of every layer its own
        config.values["num_attention_heads"] = 1
        super().__init__(config)

    def check(self) -> None:
        super().check()
        for name in ("normalize_qk_projections", "ffn_with_glu", "share_input_output_layers"):
            self.config.require(f"{name} false", bool(self.config.get(name, default=True)))

    def _per_layer(self, name: str) -> list[Any]:
        values, n_layer = self.config.get(name), self.config.n_layer
        listed = values if isinstance(values, list) else [values] * n_layer
        self.config.require(f"{name} of {len(listed)} layers", len(listed) == n_layer)
        return listed

    def keys(self) -> Keys:
        config = self.config
        heads, kv = (
            [config.bounded(name, int(n)) for n in self._per_layer(name)]
            for name in ("num_query_heads", "num_kv_heads")
        )
        unit, width = config.count("ffn_dim_divisor", default=256), config.integer("hidden_size")
        config.require(f"ffn_dim_divisor {unit}", unit > 0)
        return super().keys() | {
            "attention.head_count": heads,
            "attention.head_count_kv": kv,
            "feed_forward_length": [_in_units(float(x) * width, unit) for x in self._per_layer("ffn_multipliers")],
        }

    def view(self, target: str, source: str) -> View | None:
        if source == "ffn.proj_1":
            return lambda rows: np.split(rows, 2)[target == "ffn_up"]
        return super().view(target, source)


def _in_units(width: float, unit: int) -> int:
    """The nearest multiple of a unit, or the next one where that is less than nine tenths."""
    nearest = max(unit, int(width + unit / 2) // unit * unit)
    return nearest + unit if nearest < 0.9 * width else nearest


class Plm(Family):
    """Latent attention without a low-rank query, squared ReLU without a gate."""

    arch = "plm"
    has_output = False
    rotates_part = True
    activations = ("relu2",)
    modules: ClassVar[Modules] = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.o_proj": "attn_output",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }

    @property
    def n_rot(self) -> int:
        return self.config.integer("qk_rope_head_dim")

    def check(self) -> None:
        super().check()
        config = self.config
        rank = config.get("q_lora_rank", default=None)
        config.require(f"q_lora_rank {rank}", rank is None)
        config.require("attention_bias true", not config.get("attention_bias", default=False))
        groups = config.integer("num_key_value_heads", default=self.n_head)
        config.require(f"{groups} KV heads of {self.n_head} heads", groups == self.n_head)
        kind = config.rope()["rope_type"]
        config.require(f"RoPE scaling '{kind}'", kind == "default")

    def keys(self) -> Keys:
        config = self.config
        return super().keys() | {
            "attention.kv_lora_rank": config.integer("kv_lora_rank"),
            "attention.key_length": config.integer("qk_nope_head_dim") + self.n_rot,
            "attention.value_length": config.integer("v_head_dim"),
        }
