"""Mamba-2 alone, and what families with such layers share: names of modules, changes of layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import Change, Family, Keys, Modules, Targets, View, decay_rates

CONV = "ssm_conv1d"
"""The convolution, whose bias belongs to its channels."""


def mamba2(prefix: str) -> dict[str, Targets]:
    """Modules of a layer."""
    names = {"in_proj": "ssm_in", "conv1d": CONV, "norm": "ssm_norm", "out_proj": "ssm_out"}
    names |= {"dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d"}
    return {f"{prefix}.{name}": target for name, target in names.items()}


def mamba2_view(target: str, n_groups: int) -> View | None:
    """Change of layout of a tensor: a row per head or group, taps without a dimension of 1."""
    if target in ("ssm_a", "ssm_d"):
        return lambda values: values.reshape(-1, 1)
    if target == "ssm_norm":
        return lambda weights: weights.reshape(n_groups, -1)
    return without_ones if target == CONV else None


def mamba2_change(target: str) -> Change | None:
    """Change of the values of a tensor."""
    return decay_rates if target == "ssm_a" else None


def without_ones(values: np.ndarray) -> np.ndarray:
    """Taps of channels without a dimension of 1."""
    return values.reshape(values.shape[0], -1) if values.ndim > 1 else values


class Mamba2(Family):
    """Every layer is recurrent: no heads, no network."""

    arch = "mamba2"
    biases = frozenset({CONV})
    outer: ClassVar[Mapping[str, str]] = {
        "backbone.embeddings": "token_embd",
        "backbone.norm_f": "output_norm",
        "lm_head": "output",
    }
    modules: ClassVar[Modules] = {"norm": "attn_norm", **mamba2("mixer")}

    def __init__(self, config: Config) -> None:
        config.values = {**config.values, "num_attention_heads": 0}
        super().__init__(config)

    @property
    def n_groups(self) -> int:
        """Groups of heads that share B and C."""
        return self.config.integer("n_groups", default=8)

    def check(self) -> None:
        activation = self.config.get("hidden_act", default="silu")
        self.config.require(f"activation '{activation}'", activation in self.activations)
        low, high = self.config.get("time_step_limit", default=(0.0, math.inf))
        # transformers 5 writes numbers that JSON lacks as objects.
        high = high.get("__float__", 0.0) if isinstance(high, dict) else high
        self.config.require(f"steps between {low} and {high}", float(low) <= 0 and float(high) == math.inf)

    def keys(self) -> Keys:
        config = self.config
        heads = config.integer("num_heads", default=128)
        return {
            "block_count": config.n_layer,
            "context_length": 1 << 20,  # of any length, as llama.cpp writes it
            "embedding_length": config.integer("hidden_size"),
            "feed_forward_length": 0,
            "attention.head_count": 0,
            self.norm_key: config.epsilon("layer_norm_epsilon", default=1e-5),
            "ssm.conv_kernel": config.integer("conv_kernel", default=4),
            "ssm.inner_size": heads * config.integer("head_dim", default=64),
            "ssm.state_size": config.integer("state_size", default=128),
            "ssm.time_step_rank": heads,
            "ssm.group_count": self.n_groups,
        }

    def view(self, target: str, source: str) -> View | None:
        return mamba2_view(target, self.n_groups)

    def change(self, target: str) -> Change | None:
        return mamba2_change(target)
