"""Choice of pools whose index keys are plain means of those of their tokens (QSA of Qwen4-Exp).

Raw keys of tokens are averaged, then normed, and rotated as the first position of their pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikpy.errors import UnsupportedError
from ikpy.graph.ir import F32, Value, external
from ikpy.models.batch import BatchGraph
from ikpy.models.compressed_attention import stored_stretches
from ikpy.models.keys import Keys
from ikpy.models.pooled_indexer import PooledSizes, choose_by_keys
from ikpy.models.rope import RopeParams
from ikpy.models.weights import WeightSource

RAW = "iv"
"""Cache of the keys of single tokens."""


@dataclass
class MeanIndexer:
    """Projections q [D, size H] and k [D, size] with their norms. zeros: f32 [size], the gates of a plain mean; ones:
    f32 [H], the weights of the heads.
    """

    q: Value
    k: Value
    q_norm: Value
    k_norm: Value
    zeros: Value
    ones: Value


def read_mean_pools(keys: Keys, n_layer: int, n_predict: int, n_rot: int) -> PooledSizes | None:
    """Sizes of a file, None if its layers attend to everything. full: of the layers that choose, n_layer and those that
    predict, if the file says so of them.
    """
    n_listed = keys.n_listed("attention.compress_ratios", n_layer)
    n_all = n_layer + n_predict
    ratios = (keys.per_layer("attention.compress_ratios", n_listed, 0) + [0] * n_predict)[:n_all]
    pools = sorted({ratio for ratio in ratios if ratio})
    if len(pools) > 1:
        raise UnsupportedError(f"{keys.gguf.path}: pools of {pools} cells in one model are not supported")
    if not pools:
        return None
    sizes = PooledSizes(
        n_heads=keys.u32("attention.indexer.head_count"),
        size=keys.u32("attention.indexer.key_length"),
        top_k=keys.u32("attention.indexer.top_k"),
        neox=True,
        full=tuple(map(bool, ratios)),
        pool=pools[0],
        sources=(RAW,),
    )
    sizes.check(keys.gguf.path, n_rot)
    return sizes


def take_mean_indexer(weights: WeightSource, prefix: str, sizes: PooledSizes, d: int) -> MeanIndexer:
    """The indexer of a layer of d channels."""
    zeros, ones = np.zeros(sizes.size, np.float32), np.ones(sizes.n_heads, np.float32)
    return MeanIndexer(
        q=weights.take(f"{prefix}.indexer.q_proj.weight", (d, sizes.n_heads * sizes.size)),
        k=weights.take(f"{prefix}.indexer.k_proj.weight", (d, sizes.size)),
        q_norm=weights.take(f"{prefix}.indexer.q_norm.weight", (sizes.size,)),
        k_norm=weights.take(f"{prefix}.indexer.k_norm.weight", (sizes.size,)),
        zeros=external(zeros.ctypes.data, zeros, F32, zeros.shape, f"{prefix}.index_zeros", "weight"),
        ones=external(ones.ctypes.data, ones, F32, ones.shape, f"{prefix}.index_ones", "weight"),
    )


def choose_mean_pools(
    b: BatchGraph,
    il: int,
    indexer: MeanIndexer,
    sizes: PooledSizes,
    h: Value,
    *,
    n_rot: int,
    rope: RopeParams,
    eps: float,
) -> None:
    """Keeps the raw keys of hidden states h [D, T], makes those of pools that end with them, and chooses."""
    g, size = b.graph, sizes.size
    b.store(il, RAW, g.mul_mat(indexer.k, h).reshape(size, 1, b.n_tokens))
    n_cells = b.cache(il, RAW).shape[2]
    gates, bias = indexer.zeros.view((size, 1, n_cells), (0, 0)), indexer.zeros.view((size, sizes.pool), (0,))
    means, starts, taken = stored_stretches(b, il, RAW, gates, bias, size)
    pooled = g.rms_norm(means, indexer.k_norm, eps).reshape(size, 1, means.shape[1])
    pooled = sizes.rotate(g, pooled, b.rope_table(n_rot, rope, pos=starts))

    def queries() -> tuple[Value, Value]:
        q = g.mul_mat(indexer.q, h).reshape(size, sizes.n_heads, b.n_tokens)
        q = sizes.rotate(g, g.rms_norm(q, indexer.q_norm, eps), b.rope_table(n_rot, rope))
        return q, indexer.ones.view((sizes.n_heads, b.n_tokens), (0,))

    choose_by_keys(b, il, sizes, pooled.reshape(size, means.shape[1]), taken, queries)
