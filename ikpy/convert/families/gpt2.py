"""GPT-2, StarCoder (gpt_bigcode) and CodeShell: names of GPT-2, LayerNorm and biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Modules, View
from ikpy.convert.families.plain import UNGATED, LayerNormFamily, interleaved_heads

_NORMS = frozenset({"attn_norm", "ffn_norm", "output_norm"})


class Gpt2Names(LayerNormFamily):
    """Values and modules as GPT-2 calls them, with or without `transformer.` ahead."""

    biases = _NORMS | UNGATED | {"attn_qkv", "attn_output"}
    needed_biases = biases
    activations: ClassVar[tuple[str, ...]] = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    aliases: ClassVar[Mapping[str, str]] = {
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
        "n_ctx": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"layer_norm_eps": 1e-5}
    outer: ClassVar[Mapping[str, str]] = {
        **{f"{prefix}wte": "token_embd" for prefix in ("", "transformer.")},
        **{f"{prefix}wpe": "position_embd" for prefix in ("", "transformer.")},
        **{f"{prefix}ln_f": "output_norm" for prefix in ("", "transformer.")},
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.get("intermediate_size", default=None) is None:
            config.values["intermediate_size"] = 4 * config.integer("hidden_size")

    def check(self) -> None:
        super().check()
        usual = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
        for name, needed in usual.items():
            value = bool(self.config.get(name, default=needed))
            self.config.require(f"{name} {str(value).lower()}", value == needed)


class Gpt2(Gpt2Names):
    """Matrices are stored the other way round."""

    arch = "gpt2"

    def view(self, target: str, source: str) -> View | None:
        if source in self.modules and not target.endswith("norm"):
            return lambda values: values.T
        return super().view(target, source)


class GptBigCode(Gpt2Names):
    """StarCoder and SantaCoder: one KV head, or q, k and v in turns, head by head."""

    arch = "starcoder"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.is_shared = bool(config.get("multi_query", default=True))
        self.n_head_kv = 1 if self.is_shared else self.n_head

    def view(self, target: str, source: str) -> View | None:
        if target == "attn_qkv" and not self.is_shared:
            return interleaved_heads(self.n_head, 1, self.config.head_dim)
        return super().view(target, source)


class CodeShell(Gpt2Names):
    """Rotated heads instead of embedded positions."""

    arch = "codeshell"
    needs_output = True
    aliases: ClassVar[Mapping[str, str]] = {**Gpt2Names.aliases, "num_query_groups": "num_key_value_heads"}

    def check(self) -> None:
        super().check()
        kind = self.config.get("position_embedding_type", default="rope")
        self.config.require(f"position_embedding_type '{kind}'", kind == "rope")
        groups = bool(self.config.get("group_query_attention", default=True))
        self.config.require("group_query_attention false", groups)
