"""Sparse attention of DeepSeek-V3.2 (arXiv:2512.02556): an indexer chooses the cells that a token attends to."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.builder import Graph
from ikpy.graph.ir import ALWAYS, CellRange, Value
from ikpy.models.batch import FULL, BatchGraph, CacheSpec, GraphParams, Window
from ikpy.models.weights import WeightSource
from ikpy.quants import registry

LISTED_ON_DEVICES, LARGEST_ON_DEVICES = 8, 128
"""Tokens of a batch that devices attend to chosen cells for one by one, more hide the others by a mask; and elements of
an index key up to which devices choose."""
KEY_NORM_EPS = 1e-6
"""Of the LayerNorm of index keys of DeepSeek V3.2 and GLM-5; no key of the files says it."""
TENSORS = ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
"""What a layer with an indexer has behind its prefix."""


@dataclass(frozen=True)
class IndexerSizes:
    """Heads, elements of a head, and cells that a token attends to. neox: pairing of rotated elements.

    full: of every layer whether an indexer of its own chooses; the others take the choice of the layer before.
    rotates_last: the last elements of a head are rotated, not the first. norm_eps: of the LayerNorm of keys.
    """

    n_heads: int
    size: int
    top_k: int
    neox: bool
    full: tuple[bool, ...]
    rotates_last: bool = False
    norm_eps: float = KEY_NORM_EPS

    def rotate(self, g: Graph, x: Value, table: Value) -> Value:
        """RoPE of queries or keys [size, H, T]."""
        return g.rope(x, table, neox=self.neox, offset=self.size - table.shape[0] if self.rotates_last else 0)


@dataclass
class Indexer:
    """Tensors of a layer: q_b reads the normed query latent, k and proj (a weight per head) its hidden states."""

    q_b: Value
    k: Value
    k_norm: Value
    k_norm_bias: Value
    proj: Value


def take_indexer(weights: WeightSource, prefix: str, sizes: IndexerSizes, d: int, q_rank: int) -> Indexer:
    """The indexer of a layer of d channels with query latents of q_rank elements."""
    heads, size = sizes.n_heads, sizes.size
    return Indexer(
        q_b=weights.take(f"{prefix}.indexer.attn_q_b.weight", (q_rank, heads * size)),
        k=weights.take(f"{prefix}.indexer.attn_k.weight", (d, size)),
        k_norm=weights.take(f"{prefix}.indexer.k_norm.weight", (size,)),
        k_norm_bias=weights.take(f"{prefix}.indexer.k_norm.bias", (size,)),
        proj=weights.take(f"{prefix}.indexer.proj.weight", (d, heads)),
    )


def check_sizes(path: object, n_heads: int, size: int, top_k: int, n_rot: int) -> None:
    """FileFormatError for sizes that no indexer can have."""
    if min(n_heads, top_k) < 1 or size < max(n_rot, 1):
        raise FileFormatError(
            f"{path}: an indexer of {n_heads} heads of {size} elements, {n_rot} of them rotated, "
            f"that chooses {top_k} cells"
        )


def chosen_on_devices(size: int) -> bool:
    """Whether devices choose cells by index keys of `size` elements."""
    return size <= LARGEST_ON_DEVICES and size % 8 == 0


def effective_top_k(top_k: int, params: GraphParams) -> int:
    """Cells that a token attends to, 0 for all. top_k: those of the model."""
    return top_k if params.sparse_top_k < 0 else params.sparse_top_k


def index_cache(size: int, params: GraphParams, window: Window = FULL) -> CacheSpec:
    """The cached index keys of a layer, of `size` elements. UsageError for a type whose blocks are longer."""
    kind = registry.by_id(params.type_indexer)
    if size % kind.block_elements:
        raise UsageError(
            f"-ictk {kind.name}: index keys of {size} elements are no multiple of its block size {kind.block_elements}"
        )
    return CacheSpec("ki", size, 1, kind.id, window)


def choose_cells(
    b: BatchGraph, il: int, indexer: Indexer, sizes: IndexerSizes, h: Value, q_latent: Value, table: Value
) -> None:
    """Stores the index keys of hidden states h [d, T] and makes the choice for query latents [rq, T], in b.chosen.

    The positive factors of scores, n_heads^-1/2 and size^-1/2, are left out: only their order counts.
    """
    g, heads, size, n_tokens = b.graph, sizes.n_heads, sizes.size, b.n_tokens
    top_k = effective_top_k(sizes.top_k, b.params)
    keys = g.layer_norm(g.mul_mat(indexer.k, h), indexer.k_norm, indexer.k_norm_bias, sizes.norm_eps)
    b.store(il, "ki", sizes.rotate(g, keys.reshape(size, 1, n_tokens), table))
    b.chosen = None
    if top_k >= b.params.n_ctx and g.collector is None:
        return
    # Statistics are those of all tokens, wherever they stand.
    with g.only(ALWAYS if g.collector else CellRange(above=top_k)):
        q = sizes.rotate(g, g.mul_mat(indexer.q_b, q_latent).reshape(size, heads, n_tokens), table)
        weights = g.mul_mat(indexer.proj, h)
        if top_k < b.params.n_ctx:
            b.chosen = g.choose_cells(q, weights, b.attended(il, "ki"), b.mask(), top_k)


@dataclass(frozen=True)
class Visible:
    """What an attention op gets to know about the cells that its tokens see: arguments of Graph.attention."""

    mask: tuple[Value, Value]
    chosen: Value | None = None
    common: Value | None = None

    def of_tokens(self, first: int, n: int) -> Visible:
        """The same for some of the tokens."""
        mask, ranges, chosen, common = (
            None if x is None else x.slice(1, first, n) for x in (*self.mask, self.chosen, self.common)
        )
        assert mask is not None and ranges is not None
        return Visible((mask, ranges), chosen, common)


def visible(b: BatchGraph, *, listed: bool, upto: int = 0, window: Window = FULL) -> Visible:
    """The chosen cells, all if none were chosen: as lists, or as a mask (for upto cells at most, 0: any number). Of
    layers with a window all that it shows.
    """
    mask, ranges = b.mask(*window)
    if window != FULL or b.chosen is None or 0 < upto < b.chosen.shape[0]:
        return Visible((mask, ranges))
    if listed:
        return Visible((mask, ranges), chosen=b.chosen)
    n_cells = min(upto, mask.shape[0]) if upto else mask.shape[0]
    return Visible((b.graph.chosen_mask(mask, b.chosen, n_cells), ranges), common=mask)
