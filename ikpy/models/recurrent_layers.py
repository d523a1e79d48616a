"""Decoders some of whose layers have states instead of caches, or beside them."""

from __future__ import annotations

from typing import ClassVar

from ikpy.graph.ir import Value
from ikpy.models.base import Decoder
from ikpy.models.batch import CacheSpec, GraphParams, StateSpec


class RecurrentLayers(Decoder):
    """By default the layers without KV heads are recurrent (see `may_lack_heads`)."""

    keeps_caches: ClassVar[bool] = False
    """Whether recurrent layers attend as well."""

    def has_state(self, layer: int) -> bool:
        """Whether a layer has a state."""
        return self.hp.n_head_kv[layer] == 0

    def layer_states(self) -> list[StateSpec]:
        """State tensors of every recurrent layer."""
        raise NotImplementedError

    def state_specs(self, layer: int) -> list[StateSpec]:
        return self.layer_states() if self.has_state(layer) else []

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        return [] if self.has_state(layer) and not self.keeps_caches else super().cache_specs(layer, params)

    def divisible_heads(self, layer: int) -> int:
        return 0 if self.has_state(layer) else super().divisible_heads(layer)

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None  # positions of what a state holds cannot be moved


def rows_as_heads(mixed: Value, start: int, size: int, n_heads: int) -> Value:
    """Heads [size, n_heads, T] that begin with a row of mixed [C, T]."""
    item = mixed.strides[0]
    return mixed.view((size, n_heads, mixed.shape[1]), (size * item, mixed.strides[1]), start * item)
