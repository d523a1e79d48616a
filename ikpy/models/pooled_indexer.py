"""Sparse attention by pools: an indexer chooses whole stretches of positions, whose index keys are weighted means
(GLM-5.3) or plain ones (Qwen4-Exp); tokens behind the last whole stretch are always attended to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.ir import ALWAYS, F32, CellRange, Value
from ikpy.models.batch import EVERY, FULL, BatchGraph, CacheSpec, GraphParams, Window
from ikpy.models.compressed_attention import compress_stretches
from ikpy.models.keys import Keys
from ikpy.models.sparse_attention import (
    KEY_NORM_EPS,
    Indexer,
    IndexerSizes,
    check_sizes,
    effective_top_k,
    index_cache,
    take_indexer,
)
from ikpy.models.weights import WeightSource

MAX_POOL = 1024
SOURCES = ("iv", "ig")
"""Caches of what the next index keys are made of: keys of single tokens, and gates."""


@dataclass
class PooledIndexer(Indexer):
    """With what weighs the tokens of a pool: gate [D, size] reads their hidden states, bias [size, pool] is added."""

    gate: Value
    bias: Value


@dataclass(frozen=True)
class PooledSizes(IndexerSizes):
    """top_k counts single tokens; pool: positions that share an index key; sources: caches of what keys are made of."""

    pool: int = field(kw_only=True)
    sources: tuple[str, ...] = SOURCES

    @classmethod
    def read(cls, keys: Keys, n_layer: int) -> PooledSizes:
        """Sizes of a file. FileFormatError for those that no model has."""
        n_listed = keys.n_listed("attention.indexer.types", n_layer)
        sizes = cls(
            n_heads=keys.u32("attention.indexer.head_count"),
            size=keys.u32("attention.indexer.key_length"),
            top_k=keys.u32("attention.indexer.top_k"),
            neox=False,
            full=tuple(map(bool, keys.per_layer("attention.indexer.types", n_listed, 1)[:n_layer])),
            pool=keys.u32("attention.indexer.kpool"),
        )
        path = keys.gguf.path
        sizes.check(path, 0)
        if not keys.boolean("attention.indexer.kpool_select_tail", True):
            raise UnsupportedError(
                f"{path}: {keys.arch}.attention.indexer.kpool_select_tail is false; only models that attend to the "
                "tokens behind the last whole pool are supported"
            )
        return sizes

    def check(self, path: object, n_rot: int) -> None:
        """FileFormatError for sizes that no model has; n_rot: rotated elements of an index key."""
        check_sizes(path, self.n_heads, self.size, self.top_k, n_rot)
        if not 2 <= self.pool <= MAX_POOL or self.top_k % self.pool:
            raise FileFormatError(f"{path}: {self.top_k} chosen cells in pools of {self.pool} are not possible")

    def windows(self) -> list[Window]:
        """Those of all tokens, and of the tokens that the next index keys are made of."""
        return [FULL, ("sliding", self.pool)]

    def caches(self, params: GraphParams) -> list[CacheSpec]:
        """Index keys of pools, and what the next ones are made of."""
        sources = [CacheSpec(name, self.size, 1, F32, ("sliding", self.pool)) for name in self.sources]
        return [*sources, index_cache(self.size, params, (EVERY, self.pool))]


def take_pooled_indexer(weights: WeightSource, prefix: str, sizes: PooledSizes, d: int, q_rank: int) -> PooledIndexer:
    """The indexer of a layer of d channels with query latents of q_rank elements."""
    return PooledIndexer(
        **vars(take_indexer(weights, prefix, sizes, d, q_rank)),
        gate=weights.take(f"{prefix}.indexer_compressor_gate.weight", (d, sizes.size)),
        bias=weights.take(f"{prefix}.indexer_compressor_ape.weight", (sizes.size, sizes.pool)),
    )


def choose_pools(b: BatchGraph, il: int, indexer: PooledIndexer, sizes: PooledSizes, h: Value, q_latent: Value) -> None:
    """Stores the index keys of pools that end with hidden states h [D, T], and makes the choice for query latents
    [rq, T], in b.chosen.

    The positive factors of scores, n_heads^-1/2 and size^-1/2, are left out: only their order counts.
    """
    g = b.graph
    keys = g.layer_norm(g.mul_mat(indexer.k, h), indexer.k_norm, indexer.k_norm_bias, KEY_NORM_EPS)
    means, _, taken = compress_stretches(b, il, SOURCES, (keys, g.mul_mat(indexer.gate, h)), indexer.bias, sizes.size)

    def queries() -> tuple[Value, Value]:
        q = g.mul_mat(indexer.q_b, q_latent)
        return q.reshape(sizes.size, sizes.n_heads, b.n_tokens), g.mul_mat(indexer.proj, h)

    choose_by_keys(b, il, sizes, means, taken, queries)


def choose_by_keys(
    b: BatchGraph, il: int, sizes: PooledSizes, keys: Value, taken: Value, queries: Callable[[], tuple[Value, Value]]
) -> None:
    """Stores the keys [size, E] of pools that end with the batch in their cells, and makes the choice, in b.chosen.

    queries: makes those of the tokens [size, H, T], and the weights of their heads [H, T].
    """
    g, pool, every = b.graph, sizes.pool, (EVERY, sizes.pool)
    cached = b.cache(il, "ki")
    g.kv_store(keys.reshape(sizes.size, 1, keys.shape[1]), cached, taken)
    b.chosen = None
    n_pools = max(1, effective_top_k(sizes.top_k, b.params) // pool)
    most = pool * (n_pools + 1) - 1  # cells that a token chooses
    if most >= b.params.n_ctx and g.collector is None:
        return
    # Statistics are those of all tokens, wherever they stand; devices run everything whatever is attended to.
    with g.only(ALWAYS if g.collector or b.params.on_devices else CellRange(above=most)):
        q, weights = queries()
        if most >= b.params.n_ctx:
            return
        _, ends, _ = b.cells[every]
        chosen = g.choose_cells(q, weights, cached, b.mask(*every), n_pools)
        b.chosen = g.stretch_cells(chosen, ends, b.mask(), b.cells[FULL][1], b.inputs["pos"], pool)
