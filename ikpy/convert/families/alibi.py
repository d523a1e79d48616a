"""BLOOM, MPT, Jais and Refact: linear biases of attention (ALiBi) instead of rotated heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import Change, Family, Keys, Modules, View, half_of_rows
from ikpy.convert.families.gpt2 import Gpt2, Gpt2Names
from ikpy.convert.families.plain import BLOOM_NAMES, NORMS, UNGATED, LayerNormFamily, interleaved_heads
from ikpy.models.alibi import KEY, MAX_BIAS


class Bloom(LayerNormFamily):
    """q, k and v in turns, head by head; a norm of the embeddings."""

    arch = "bloom"
    biases = NORMS | UNGATED | {"attn_qkv", "attn_output", "token_embd_norm"}
    needed_biases = biases
    aliases: ClassVar[Mapping[str, str]] = {
        "layer_norm_epsilon": "layer_norm_eps",
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048}
    outer: ClassVar[Mapping[str, str]] = {
        **{
            f"{prefix}{name}": target
            for prefix in ("", "transformer.")
            for name, target in {
                "word_embeddings": "token_embd",
                "word_embeddings_layernorm": "token_embd_norm",
                "ln_f": "output_norm",
            }.items()
        },
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "input_layernorm": "attn_norm",
        **BLOOM_NAMES,
        "post_attention_layernorm": "ffn_norm",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.values.setdefault("intermediate_size", 4 * config.integer("hidden_size"))

    def check(self) -> None:
        super().check()
        behind = bool(self.config.get("apply_residual_connection_post_layernorm", default=False))
        self.config.require("apply_residual_connection_post_layernorm true", not behind)

    def view(self, target: str, source: str) -> View | None:
        if target == "attn_qkv":
            return interleaved_heads(self.n_head, 1, self.config.head_dim)
        return super().view(target, source)


_MPT_NAMES = {
    "norm_1": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.q_ln": "attn_q_norm",
    "attn.k_ln": "attn_k_norm",
    "attn.out_proj": "attn_output",
    "norm_2": "ffn_norm",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}


_MPT_KINDS = ("multihead_attention", "multiquery_attention", "grouped_query_attention")


class Mpt(LayerNormFamily):
    """What attention does stands in `attn_config`; biases are there unless the configuration says otherwise."""

    arch = "mpt"
    biases = frozenset((*_MPT_NAMES.values(), "output_norm"))
    needed_biases = frozenset[str]()
    activations = ("gelu",)
    aliases: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "layer_norm_epsilon": "layer_norm_eps",
        "max_seq_len": "max_position_embeddings",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5, "expansion_ratio": 4}
    outer: ClassVar[Mapping[str, str]] = {
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.norm_f": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = _MPT_NAMES

    def __init__(self, config: Config) -> None:
        given = config.get("attn_config", default={})
        config.require("attn_config that is no object", isinstance(given, dict))
        self.attention: dict[str, Any] = given
        super().__init__(config)
        config.values.setdefault("intermediate_size", config.integer("expansion_ratio") * config.integer("hidden_size"))
        if self.attention.get("attn_type") == "multiquery_attention":
            self.n_head_kv = 1
        elif self.attention.get("kv_n_heads"):
            self.n_head_kv = Config(self.attention, config.path).count("kv_n_heads")

    def has(self, name: str) -> bool:
        """A value of the attention that is true or false."""
        return bool(self.attention.get(name))

    def check(self) -> None:
        super().check()
        config, scale = self.config, self.attention.get("softmax_scale")
        for name in ("prefix_lm", "rope", "attn_uses_sequence_id", "qk_gn"):
            config.require(f"attn_config with {name} true", not self.has(name))
        window = self.attention.get("sliding_window_size", -1)
        config.require(f"attn_config with sliding_window_size {window}", window in (None, -1))
        kind = self.attention.get("attn_type", _MPT_KINDS[0])
        config.require(f"attn_config with attn_type {kind}", kind in _MPT_KINDS)
        for name in ("alibi_bias_max", "clip_qkv"):
            bound = self.attention.get(name)
            is_bound = isinstance(bound, int | float) and not isinstance(bound, bool) and bound > 0
            config.require(f"attn_config with {name} {bound}", bound is None or is_bound)
        config.require(f"attn_config with softmax_scale {scale}", scale in (None, config.head_dim**-0.5))
        scale = config.get("logit_scale", default=None)
        config.require(f"logit_scale {scale}", scale is None)
        norm = str(config.get("norm_type", default="low_precision_layernorm"))
        config.require(f"norm_type '{norm}'", norm.endswith("layernorm"))
        network = config.get("ffn_config", default={})
        config.require("ffn_config that is no object", isinstance(network, dict))
        kind = network.get("ffn_type", "mptmlp")
        config.require(f"ffn_type '{kind}'", kind == "mptmlp")

    @property
    def has_biases_of_positions(self) -> bool:
        """Written configurations leave out what is usual."""
        return bool(self.attention.get("alibi", True))

    def keys(self) -> Keys:
        keys, bound = super().keys(), self.attention.get("clip_qkv")
        if self.has_biases_of_positions:
            keys[KEY] = float(self.attention.get("alibi_bias_max") or MAX_BIAS)
        if bound:
            keys["attention.clamp_kqv"] = float(bound)
        return keys

    def needed_tensors(self) -> frozenset[str]:
        return frozenset(("attn_q_norm.weight", "attn_k_norm.weight") if self.has("qk_ln") else ())

    def needed_outer_tensors(self) -> frozenset[str]:
        is_embedded = not self.has_biases_of_positions and bool(self.config.get("learned_pos_emb", default=True))
        return frozenset(("position_embd.weight",) if is_embedded else ())


class Jais(Gpt2):
    """Embeddings and logits are scaled by the configuration's factors, which become part of the matrices."""

    arch = "jais"
    biases = Gpt2Names.biases | {"ffn_gate"}
    needed_biases = biases
    needs_output = True
    activations: ClassVar[tuple[str, ...]] = ("swiglu",)
    unused = frozenset({"transformer.relative_pe.slopes"})
    modules: ClassVar[Modules] = {**Gpt2Names.modules, "mlp.c_fc2": "ffn_gate"}

    def check(self) -> None:
        super().check()
        config = self.config
        kind = config.get("position_embedding_type", default="learned")
        config.require(f"position_embedding_type '{kind}'", kind == "alibi")
        config.require("alibi_scaling", config.get("alibi_scaling", default=None) is None)
        by_size = bool(config.get("mup_scale_qk_dot_by_d", "scale_qk_dot_by_d", default=False))
        config.require("mup_scale_qk_dot_by_d false", by_size)

    def keys(self) -> Keys:
        return super().keys() | {KEY: MAX_BIAS}

    def change(self, target: str) -> Change | None:
        config = self.config
        if target == "token_embd":
            factor = config.number("mup_embeddings_scale", "embeddings_scale")
        elif target == "output":
            alone = config.get("mup_output_alpha", default=None) is None
            factor = config.number("width_scale") if alone else config.number("mup_output_alpha")
            factor *= 1.0 if alone else config.number("mup_width_scale")
        else:
            return super().change(target)
        return lambda values: values * np.float32(factor)


class Refact(Family):
    """Names of GPT-2; one KV head, whose keys and values lie in one matrix, as gate and up do."""

    arch = "refact"
    needs_output = True
    aliases: ClassVar[Mapping[str, str]] = {
        **{name: new for name, new in Gpt2Names.aliases.items() if new != "hidden_act"},
        "layer_norm_epsilon": "rms_norm_eps",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"rms_norm_eps": 1e-5}
    outer: ClassVar[Mapping[str, str]] = {
        "transformer.wte": "token_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "ln_1": "attn_norm",
        "attn.q": "attn_q",
        "attn.kv": ("attn_k", "attn_v"),
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
        "mlp.c_proj": "ffn_down",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.n_head_kv = 1
        width = config.integer("hidden_size")
        # Two thirds of four times the width, in whole units.
        config.values["intermediate_size"] = -(-(8 * width // 3) // _REFACT_UNIT) * _REFACT_UNIT

    def check(self) -> None:
        super().check()
        shared = bool(self.config.get("multi_query", default=True))
        self.config.require("multi_query false", shared)

    def view(self, target: str, source: str) -> View | None:
        return half_of_rows(self.modules.get(source, ()), target) or super().view(target, source)


_REFACT_UNIT = 256
