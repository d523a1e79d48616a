"""DeciLM, and Llama-Nemotron Super and Ultra: what every layer is stands in a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, ATTENTION_AND_DENSE, DENSE, Family, Keys, Modules, View, rope_pairs
from ikpy.convert.rope import dynamic_notes

WIDTH_UNIT = 256
"""Widths of networks are multiples of it."""


def rope_pairs_of(size: int) -> View:
    """Rows of q or k as `rope_pairs` has them, of any number of heads of this size."""

    def view(rows: np.ndarray) -> np.ndarray:
        return rope_pairs(rows.shape[0] // size)(rows)

    return view


class Deci(Family):
    """DeciLM 7B: only the numbers of KV heads differ."""

    arch = "deci"
    biases = ATTENTION_AND_DENSE
    rotates_pairs = True
    rope_scalings = ("llama3", "dynamic")
    modules: ClassVar[Modules] = {**ATTENTION, "self_attn.linear_attn": "attn_output", **DENSE}

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        return DeciByBlocks if config.get("block_configs", default=None) is not None else Deci

    def check(self) -> None:
        super().check()
        self.kv_heads()

    def kv_heads(self) -> list[int]:
        """KV heads of every layer, 0 where it does not attend."""
        config = self.config
        listed = config.get("num_key_value_heads_per_layer", default=[self.n_head_kv] * config.n_layer)
        fits = isinstance(listed, list) and len(listed) == config.n_layer and all(type(n) is int for n in listed)
        config.require(f"num_key_value_heads_per_layer {listed!r}", fits)
        return listed

    def keys(self) -> Keys:
        return super().keys() | {"attention.head_count_kv": self.kv_heads()}

    def view(self, target: str, source: str) -> View | None:
        if target in ("attn_q", "attn_k"):
            return rope_pairs_of(self.config.head_dim)
        return super().view(target, source)

    def notes(self) -> list[str]:
        return dynamic_notes(self.config)


class DeciByBlocks(Deci):
    """Llama-Nemotron: `block_configs` has the attention and the network of every layer."""

    def __init__(self, config: Config) -> None:
        config.values = {**config.values, "intermediate_size": 0, "num_key_value_heads": None}
        super().__init__(config)
        blocks = config.get("block_configs")
        fits = isinstance(blocks, list) and len(blocks) == config.n_layer
        config.require(f"block_configs for other than {config.n_layer} layers", fits)
        self.mixing = [self.part(block, "attention") for block in blocks]
        self.networks = [self.part(block, "ffn") for block in blocks]

    def part(self, block: Any, name: str) -> Mapping[str, Any]:
        """The values of a part of a layer that say something."""
        values = block.get(name) if isinstance(block, dict) else None
        if not isinstance(values, dict):
            self.config.require(f"block_configs without '{name}' in a layer", False)
            return {}
        said = {key: value for key, value in values.items() if value not in (None, False, [])}
        known = {"no_op", "n_heads_in_group", "replace_with_linear"} if name == "attention" else {"no_op", "ffn_mult"}
        strange = next((key for key in said if key not in known), "")
        self.config.require(f"{name} with {strange} {said.get(strange)!r} in a layer", not strange)
        return said

    def check(self) -> None:
        super().check()
        for il, (kv, f) in enumerate(zip(self.kv_heads(), self.widths(), strict=True)):
            mixing = self.mixing[il]
            fits = sum(map(bool, (kv, "no_op" in mixing, "replace_with_linear" in mixing))) == 1
            self.config.require(f"attention {dict(mixing)} in layer {il}", fits)
            fits = bool(f) != ("no_op" in self.networks[il])
            self.config.require(f"ffn {dict(self.networks[il])} in layer {il}", fits)

    def kv_heads(self) -> list[int]:
        groups = [mixing.get("n_heads_in_group", 0) for mixing in self.mixing]
        bad = next((n for n in groups if type(n) is not int or n < 0 or (n and self.n_head % n)), None)
        self.config.require(f"groups of {bad!r} of {self.n_head} heads", bad is None)
        return [self.n_head // n if n else 0 for n in groups]

    def heads(self) -> list[int]:
        """Heads of every layer, 0 where neither attention nor a matrix is in their place."""
        return [0 if "no_op" in mixing else self.n_head for mixing in self.mixing]

    def widths(self) -> list[int]:
        """Width of the network of every layer, 0 where it has none."""
        n_embd = self.config.count("hidden_size")
        factors = [network.get("ffn_mult", 0) for network in self.networks]
        bad = next((f for f in factors if type(f) not in (int, float) or not 0 <= f < n_embd), None)
        self.config.require(f"ffn_mult {bad!r}", bad is None)
        exact = [int(2 * f * n_embd / 3) for f in factors]
        return [-(-n // WIDTH_UNIT) * WIDTH_UNIT for n in exact]

    def keys(self) -> Keys:
        return super().keys() | {"attention.head_count": self.heads(), "feed_forward_length": self.widths()}

    def is_empty(self, layer: int) -> bool:
        return "no_op" in self.mixing[layer] and "no_op" in self.networks[layer]
