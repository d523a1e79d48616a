"""Baichuan, XVERSE, Orion, Qwen 1, PLaMo and Chameleon: names of llama or GPT-2, matrices joined or reordered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    Change,
    Family,
    Keys,
    Modules,
    View,
    feed_forward,
    rope_pairs,
)
from ikpy.convert.families.plain import LayerNormFamily

_VOCABULARY_OF_2 = 125696
_SHORTEST = 1e-12


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows divided by their lengths."""
    return rows / np.maximum(np.sqrt(np.square(rows).sum(-1, keepdims=True)), np.float32(_SHORTEST))


class Baichuan(Family):
    """q, k and v in one matrix; rows of the output matrix of Baichuan 2 have length 1."""

    arch = "baichuan"
    rotates_pairs = True
    aliases: ClassVar[Mapping[str, str]] = {"model_max_length": "max_position_embeddings"}
    modules: ClassVar[Modules] = {
        **{
            module: target
            for module, target in ATTENTION.items()
            if module not in {f"self_attn.{x}_proj" for x in "qkv"}
        },
        **DENSE,
        "self_attn.W_pack": ("attn_q", "attn_k", "attn_v"),
    }

    def view(self, target: str, source: str) -> View | None:
        if source != "self_attn.W_pack":
            return super().view(target, source)
        part, pairs = ("attn_q", "attn_k", "attn_v").index(target), rope_pairs(self.n_head)

        def view(rows: np.ndarray) -> np.ndarray:
            taken = np.split(rows, 3)[part]
            return taken if target == "attn_v" else pairs(taken)

        return view

    def change(self, target: str) -> Change | None:
        is_second = self.config.integer("vocab_size", default=0) == _VOCABULARY_OF_2
        return unit_rows if target == "output" and is_second else super().change(target)


class Xverse(Family):
    """XVERSE 7B, 13B and 65B."""

    arch = "xverse"
    needs_output = True
    rotates_pairs = True


class Orion(LayerNormFamily):
    """Norms that the configuration calls RMS norms take the mean off."""

    arch = "orion"
    biases = needed_biases = frozenset({"attn_norm", "ffn_norm", "output_norm"})
    needs_output = True

    def check(self) -> None:
        super().check()
        bias = bool(self.config.get("attention_bias", default=False))
        self.config.require("attention_bias true", not bias)


class Qwen(Family):
    """Qwen 1: names of GPT-2, a bias of q, k and v, gate and up counted together."""

    arch = "qwen"
    biases = needed_biases = frozenset({"attn_qkv"})
    needs_output = True
    aliases: ClassVar[Mapping[str, str]] = {
        "layer_norm_epsilon": "rms_norm_eps",
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "partial_rotary_factor",
        "seq_length": "max_position_embeddings",
    }
    outer: ClassVar[Mapping[str, str]] = {
        "transformer.wte": "token_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.w1": "ffn_up",
        "mlp.w2": "ffn_gate",
        "mlp.c_proj": "ffn_down",
    }

    def __init__(self, config: Config) -> None:
        if "seq_length" in config.values:  # those of training, whatever max_position_embeddings says
            config.values.pop("max_position_embeddings", None)
        super().__init__(config)

    def check(self) -> None:
        super().check()
        bias = not self.config.get("no_bias", default=True)
        self.config.require("no_bias false", not bias)

    def notes(self) -> list[str]:
        stretches = [name for name in ("use_dynamic_ntk", "use_logn_attn") if self.config.get(name, default=False)]
        length = self.config.n_context
        return [f"{' and '.join(stretches)} set in beyond {length} tokens and are left out"] if stretches else []


class Plamo(Family):
    """PLaMo 13B: head h of q reads head h modulo 5 of k; files have those that share one side by side."""

    arch = "plamo"
    needs_output = True
    modules: ClassVar[Modules] = {
        "norm": "attn_norm",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        "self_attn.o_proj": "attn_output",
        **feed_forward("mlp"),
    }
    defaults: ClassVar[Mapping[str, int | float]] = {"max_position_embeddings": 4096, "n_shared_head": 8}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.n_shared = config.count("n_shared_head")
        config.require(
            f"n_shared_head {self.n_shared} of {self.n_head} heads",
            self.n_shared > 0 and self.n_head % self.n_shared == 0,
        )
        self.n_head_kv = self.n_head // self.n_shared

    def keys(self) -> Keys:
        return super().keys() | {"attention.head_count_kv": self.n_head_kv}

    def view(self, target: str, source: str) -> View | None:
        turned = (self.n_shared, self.n_head_kv, self.config.head_dim)
        if target == "attn_q":
            return lambda rows: rows.reshape(*turned, -1).swapaxes(0, 1).reshape(rows.shape)
        if target == "attn_output":
            return lambda rows: rows.reshape(-1, *turned).swapaxes(1, 2).reshape(rows.shape)
        return super().view(target, source)


class Chameleon(Family):
    """Text models; heads of q and k have LayerNorms of their own, rotated rows among them."""

    arch = "chameleon"
    rotates_pairs = True
    modules: ClassVar[Modules] = {**ATTENTION, **DENSE, **HEAD_NORMS}
    biases = frozenset({"attn_q_norm", "attn_k_norm"})

    def keys(self) -> Keys:
        return super().keys() | {"swin_norm": bool(self.config.get("swin_norm", default=False))}

    def view(self, target: str, source: str) -> View | None:
        if target not in ("attn_q_norm", "attn_k_norm"):
            return super().view(target, source)
        return lambda rows: rows.reshape(len(rows), 2, -1).swapaxes(1, 2).reshape(rows.shape)

    def needed_tensors(self) -> frozenset[str]:
        return frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})
