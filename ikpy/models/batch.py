"""What an architecture sees while it builds the graph of one micro-batch shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ikpy.graph.builder import Graph
from ikpy.graph.ir import Value
from ikpy.models.rope import RopeParams


@dataclass(frozen=True)
class CacheSpec:
    """One cache tensor of a layer: rows of n elements for each of n_heads heads per cell."""

    name: str
    n: int
    n_heads: int
    type_id: int


@dataclass
class GraphParams:
    """Settings of a context that shape the graph."""

    n_ctx: int
    flash_attn: bool
    mla: int
    attn_max_batch: int  # MiB, 0 = unlimited
    type_k: int
    type_v: int
    rope: RopeParams
    expert_reduction: tuple[int, float]
    causal: bool = True
    n_seq_max: int = 1
    grouped_experts: bool = False


@dataclass
class BatchGraph:
    """Inputs, caches and shared intermediate values of one micro-batch.

    inputs: tokens, pos, seq, cells (i32 [T]), outputs (i32 [n_outputs]), cell_pos (i32 [n_ctx]) and cell_seq
    (i64 [n_ctx]).
    caches: (layer, name) -> cache tensor [n, n_heads, n_ctx].
    """

    graph: Graph
    n_tokens: int
    n_outputs: int
    inputs: dict[str, Value]
    caches: dict[tuple[int, str], Value]
    params: GraphParams
    embeddings: Value | None = None
    _masks: dict[tuple[str, int], tuple[Value, Value]] = field(default_factory=dict)
    _rope_tables: dict[tuple, Value] = field(default_factory=dict)
    _temperatures: dict[tuple[float, int, int], Value] = field(default_factory=dict)

    def mask(self, window: str = "none", n_swa: int = 0) -> tuple[Value, Value]:
        """The mask of this window kind, built once per batch."""
        key = (window, n_swa)
        if key not in self._masks:
            self._masks[key] = self.graph.kq_mask(
                self.inputs,
                self.n_tokens,
                self.params.n_ctx,
                window=window,
                n_swa=n_swa,
                causal=self.params.causal,
            )
        return self._masks[key]

    def rope_table(self, n_rot: int, rope: RopeParams, factors: Value | None = None) -> Value:
        """The rotation table for these parameters, built once per batch."""
        key = (n_rot, rope, id(factors))
        if key not in self._rope_tables:
            values = rope.kernel_params(n_rot)
            self._rope_tables[key] = self.graph.rope_table(self.inputs["pos"], n_rot, factors, values)
        return self._rope_tables[key]

    def attention_temperature(self, scale: float, period: int, offset: int) -> Value:
        """The per-token factor of Graph.attention_temperature, built once per batch."""
        key = (scale, period, offset)
        if key not in self._temperatures:
            self._temperatures[key] = self.graph.attention_temperature(self.inputs["pos"], scale, period, offset)
        return self._temperatures[key]

    def cache(self, layer: int, name: str) -> Value:
        """The whole cache tensor, for stores."""
        return self.caches[layer, name]

    def attended(self, layer: int, name: str) -> Value:
        """The first n_kv cells of a cache tensor [n, n_heads, n_kv]."""
        cache = self.caches[layer, name]
        return Value(cache.buffer, cache.type_id, cache.shape, cache.strides, cache.offset, dynamic_dim=2)

    def keep_outputs(self, layer: int, n_layer: int, *values: Value) -> Sequence[Value]:
        """In the last layer, only the rows whose logits were asked for."""
        if layer != n_layer - 1 or self.n_outputs == self.n_tokens:
            return values
        return [self.graph.get_rows(v, self.inputs["outputs"]) for v in values]
