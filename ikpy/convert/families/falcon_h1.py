"""Falcon-H1: layers in which Mamba-2 and attention read the same input side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import ATTENTION, BARE, Change, Family, Keys, Modules, View, feed_forward
from ikpy.convert.families.mamba2 import CONV, mamba2, mamba2_change, mamba2_view

# Factors in the configuration of what a matrix makes or reads -> the tensors they become part of.
_FACTORS = {
    "token_embd": ("embedding_multiplier",),
    "output": ("lm_head_multiplier",),
    "attn_q": ("attention_in_multiplier",),
    "attn_k": ("attention_in_multiplier", "key_multiplier"),
    "attn_v": ("attention_in_multiplier",),
    "attn_output": ("attention_out_multiplier",),
    "ssm_out": ("ssm_out_multiplier",),
}


class FalconH1(Family):
    """Factors of the configuration become part of the weights, as llama.cpp has it."""

    arch = "falcon-h1"
    biases = frozenset({CONV})
    bare = BARE | {"ffn_norm"}
    outer: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "token_embd",
        "model.final_layernorm": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {
        **{name: target for name, target in ATTENTION.items() if target != "ffn_norm"},
        **mamba2("mamba"),
        "pre_ff_layernorm": "ffn_norm",
        **feed_forward("feed_forward"),
    }

    @property
    def n_groups(self) -> int:
        """Groups of heads that share B and C."""
        return self.config.integer("mamba_n_groups", default=1)

    @property
    def inner(self) -> int:
        """Elements of all heads of a scan."""
        config = self.config
        return config.integer(
            "mamba_d_ssm", default=config.integer("mamba_expand", default=2) * config.integer("hidden_size")
        )

    def numbers(self, name: str, n: int) -> list[float]:
        """A list of n factors of the configuration, of ones where it has none."""
        values = self.config.get(name, default=[1.0] * n)
        fits = isinstance(values, list) and len(values) == n and all(isinstance(v, int | float) for v in values)
        self.config.require(f"{name} {values!r}", fits)
        return [float(v) for v in values]

    def check(self) -> None:
        super().check()
        config = self.config
        config.require("tied embeddings", not config.get("tie_word_embeddings", default=False))
        normed, before = (
            bool(config.get(f"mamba_{n}", default=d)) for n, d in (("rms_norm", 0), ("norm_before_gate", 1))
        )
        config.require("a norm before the gate", not (normed and before))

    def keys(self) -> Keys:
        config = self.config
        return super().keys() | {
            "ssm.conv_kernel": config.integer("mamba_d_conv", default=4),
            "ssm.inner_size": self.inner,
            "ssm.state_size": config.integer("mamba_d_state", default=256),
            "ssm.time_step_rank": config.integer("mamba_n_heads"),
            "ssm.group_count": self.n_groups,
        }

    def view(self, target: str, source: str) -> View | None:
        return mamba2_view(target, self.n_groups) or super().view(target, source)

    def change(self, target: str) -> Change | None:
        factor = np.float32(1)
        for name in _FACTORS.get(target, ()):
            factor *= np.float32(self.config.number(name, default=1.0))
        gate, down = self.numbers("mlp_multipliers", 2)
        factor *= np.float32({"ffn_gate": gate, "ffn_down": down}.get(target, 1.0))
        if factor != 1:
            return lambda values: values * factor
        return mamba2_change(target) or super().change(target)

    def row_factors(self, target: str) -> np.ndarray | None:
        if target != "ssm_in":
            return None
        config = self.config
        n = config.bounded("mamba_d_state", self.n_groups * config.integer("mamba_d_state", default=256))
        inner, heads = config.bounded("mamba_d_ssm", self.inner), config.count("mamba_n_heads")
        factors = np.repeat(self.numbers("ssm_multipliers", 5), (inner, inner, n, n, heads))
        return (factors * config.number("ssm_in_multiplier", default=1.0)).astype(np.float32)
