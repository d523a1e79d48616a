"""minimax-m3: MiniMax M3, the text model. Grouped heads over blocks of cells that indexers choose, and experts with
bounded gates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ikpy.errors import UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, CacheSpec, GraphParams
from ikpy.models.block_sparse import (
    TENSORS,
    BlockIndexer,
    BlockSizes,
    attend_to_blocks,
    choose_blocks,
    take_block_indexer,
)
from ikpy.models.blocks import cached_attention, split_heads, store_heads
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routed_moe import RoutedMoe
from ikpy.models.sparse_attention import index_cache
from ikpy.models.transformer import Attention
from ikpy.models.weights import WeightSource


@dataclass
class SparseAttention(Attention):
    """Attention of a layer with an indexer, or without."""

    indexer: BlockIndexer | None = None


class MiniMaxM3(RoutedMoe):
    """Layers with tensors of an indexer attend to chosen blocks, others to everything."""

    selection_bias = "optional"
    rotates_whole_head = False
    activation = "swiglu_oai"
    default_n_dense = 0
    default_scale = 1.0

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.sizes = BlockSizes.read(keys, set(hp.n_head_kv))
        if hp.n_rot > self.sizes.size:
            raise UnsupportedError(
                f"{keys.gguf.path}: index keys of {self.sizes.size} elements, fewer than the {hp.n_rot} rotated ones"
            )
        return hp

    # tensors

    def load_attention(self, weights: WeightSource, il: int, prefix: str) -> SparseAttention:
        attn = super().load_attention(weights, il, prefix)
        values = {field.name: getattr(attn, field.name) for field in fields(attn)}
        if not any(weights.has(f"{prefix}.indexer.{name}") for name in TENSORS):
            return SparseAttention(**values)
        indexer = take_block_indexer(weights, prefix, self.sizes, self.hp.n_embd, self.hp.n_head_kv[il])
        return SparseAttention(**values, indexer=indexer)

    # cache

    def _indexer(self, layer: int) -> BlockIndexer | None:
        attn: SparseAttention = self.layers[layer].attn  # type: ignore[attr-defined]
        return attn.indexer

    @property
    def has_indexers(self) -> bool:
        return any(self._indexer(il) for il in range(self.hp.n_layer))

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        specs = super().cache_specs(layer, params)
        if self._indexer(layer) and self.sizes.chosen_blocks(params):
            specs.append(index_cache(self.sizes.size, params))
        return specs

    def divisible_heads(self, layer: int) -> int:
        # Indexers choose cells for all heads of a token on one device.
        return 0 if self._indexer(layer) else super().divisible_heads(layer)

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None if self.has_indexers else super().shift_part(layer, params)  # index keys are rotated too

    # graph

    def attention(self, b: BatchGraph, il: int, attn: Attention, h: Value) -> Value:
        q, k, v = self.project_heads(b, il, attn, h)
        q, k = self.place_heads(b, il, attn, q, k)
        scale = self.attention_scale(il)
        if not isinstance(attn, SparseAttention) or attn.indexer is None or (il, "ki") not in b.caches:
            return cached_attention(b, il, q, k, v, scale=scale)
        index_q, index_k = self._index_heads(b, il, attn.indexer, h)
        b.store(il, "ki", index_k)
        chosen = choose_blocks(b, il, index_q, self.sizes)
        if chosen is None:
            return cached_attention(b, il, q, k, v, scale=scale)
        store_heads(b, il, k, v)
        return attend_to_blocks(b, il, q, chosen, self.sizes, scale)

    def _index_heads(self, b: BatchGraph, il: int, indexer: BlockIndexer, h: Value) -> tuple[Value, Value]:
        """Normed and rotated index queries [size, H, T] and keys [size, 1, T]."""
        g, eps, size = b.graph, self.hp.norm_eps, self.sizes.size
        q, k = split_heads(g.mul_mat(indexer.q, h), size), split_heads(g.mul_mat(indexer.k, h), size)
        q, k = g.rms_norm(q, indexer.q_norm, eps), g.rms_norm(k, indexer.k_norm, eps)
        return self.rotate(b, il, q), self.rotate(b, il, k)
