"""Sparse attention of MiniMax M3: for every KV head an index head chooses blocks of positions, which the query heads of
the KV head attend to.
"""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import FileFormatError
from ikpy.graph.ir import ALWAYS, CellRange, Value
from ikpy.models.batch import FULL, BatchGraph, GraphParams
from ikpy.models.blocks import hadamard_block, heads_per_step
from ikpy.models.keys import Keys
from ikpy.models.sparse_attention import chosen_on_devices, visible
from ikpy.models.weights import WeightSource

LISTED_TOKENS, LISTED_ON_DEVICES = 8, 1
"""Of batches with more, chosen cells are attended to by a mask: tokens that share cells are faster together. On devices
every token and head with a list has launches of its own."""
TENSORS = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
"""What a layer with an indexer has behind its prefix."""


@dataclass(frozen=True)
class BlockSizes:
    """Elements of an index key; positions of a block; blocks that a token and head sees, and those up to the token's
    own that are always among them.
    """

    size: int
    block: int
    top_k: int
    local: int

    @classmethod
    def read(cls, keys: Keys, heads: set[int]) -> BlockSizes:
        """Sizes of a file whose layers have these numbers of KV heads. FileFormatError for those no model has."""
        n_heads = keys.u32("attention.indexer.head_count")
        sizes = cls(
            size=keys.u32("attention.indexer.key_length"),
            block=keys.u32("attention.indexer.block_size"),
            top_k=keys.u32("attention.indexer.top_k"),
            local=keys.u32("attention.indexer.local_blocks"),
        )
        path = keys.gguf.path
        if {n_heads} != heads:
            raise FileFormatError(f"{path}: {n_heads} index heads; there must be one for each KV head")
        if min(sizes.size, sizes.block, sizes.top_k) < 1 or sizes.local > sizes.top_k:
            raise FileFormatError(
                f"{path}: an indexer of {sizes.size} elements that chooses {sizes.top_k} blocks of {sizes.block} "
                f"positions, {sizes.local} of them the last ones, is not possible"
            )
        return sizes

    def chosen_blocks(self, params: GraphParams) -> int:
        """Blocks that a token and head attends to, 0 for all."""
        if params.sparse_top_k < 0:
            return self.top_k
        return max(1, self.local, params.sparse_top_k // self.block) if params.sparse_top_k else 0


@dataclass
class BlockIndexer:
    """Projections of a layer's indexer and norms of its heads; q has a head for each KV head, k one."""

    q: Value
    k: Value
    q_norm: Value
    k_norm: Value


def take_block_indexer(weights: WeightSource, prefix: str, sizes: BlockSizes, d: int, heads: int) -> BlockIndexer:
    """The indexer of a layer of d channels."""
    return BlockIndexer(
        q=weights.take(f"{prefix}.indexer.q_proj.weight", (d, heads * sizes.size)),
        k=weights.take(f"{prefix}.indexer.k_proj.weight", (d, sizes.size)),
        q_norm=weights.take(f"{prefix}.indexer.q_norm.weight", (sizes.size,)),
        k_norm=weights.take(f"{prefix}.indexer.k_norm.weight", (sizes.size,)),
    )


def choose_blocks(b: BatchGraph, il: int, q: Value, sizes: BlockSizes) -> Value | None:
    """Cells that the tokens and heads of index queries q [size, H, T] attend to, None for all."""
    g, params, top_k = b.graph, b.params, sizes.chosen_blocks(b.params)
    most = top_k * sizes.block
    if most >= params.n_ctx:
        return None
    with g.only(ALWAYS if params.on_devices else CellRange(above=most)):
        keys, positions = b.attended(il, "ki"), (b.cells[FULL][1], b.inputs["pos"])
        size, local = sizes.block, sizes.local
        return g.choose_blocks(q, keys, b.mask(), *positions, top_k=top_k, size=size, local=local)


def _takes_lists(b: BatchGraph, sizes: BlockSizes) -> bool:
    """Whether tokens attend to chosen cells by their lists; on devices only to those that were made there, as the CPU
    lists no cells for tokens that see few.
    """
    if b.params.on_devices:
        return b.n_tokens <= LISTED_ON_DEVICES and chosen_on_devices(sizes.size)
    return b.n_tokens <= LISTED_TOKENS


def attend_to_blocks(b: BatchGraph, il: int, q: Value, chosen: Value, sizes: BlockSizes, scale: float) -> Value:
    """Attends with q [dk, H, T] to the stored cells of a layer that were chosen for each KV head; [dv*H, T]."""
    g, params = b.graph, b.params
    keys, values = b.attended(il, "k"), b.attended(il, "v")
    k_block = hadamard_block(keys.shape[0]) if params.k_hadamard else 0
    v_block = hadamard_block(values.shape[0]) if params.v_hadamard else 0
    q = g.hadamard(q, k_block) if k_block else q
    out = g.new(values.shape[0], q.shape[1], q.shape[2])
    group = q.shape[1] // keys.shape[1]
    for head in range(keys.shape[1]):
        b.chosen = chosen.slice(2, head, 1)
        seen = visible(b, listed=_takes_lists(b, sizes))
        g.attention(
            q.slice(1, head * group, group),
            [keys.slice(1, head, 1)],
            values.slice(1, head, 1),
            seen.mask,
            scale=scale,
            flash=params.flash_attn,
            heads_per_step=heads_per_step(b, group),
            dst=out.slice(1, head * group, group),
            chosen=seen.chosen,
            common=seen.common,
        )
    b.chosen = None
    if v_block:
        g.hadamard(out, v_block)
    return out.reshape(out.shape[0] * out.shape[1], out.shape[2])
