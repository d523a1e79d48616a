"""Attention of DeepSeek V4: a window of single tokens, and behind it compressed stretches of positions.

One head is key and value at once, rotated at its end; sums of values are rotated back. A stretch of `ratio` positions
becomes one cell when its last token arrives, a weighted mean of projections of its tokens. In layers of ratio 4 the
tokens of the stretch before take part too, and indexers choose the cells that a token attends to.

In shapes: T tokens, H heads of d elements, E cells that a batch may complete.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ikpy.graph.ir import ALWAYS, F32, CellRange, Value
from ikpy.models.batch import EVERY, BatchGraph, CacheSpec, GraphParams, Window
from ikpy.models.blocks import hadamard_block, heads_per_step
from ikpy.models.rope import RopeParams
from ikpy.models.sparse_attention import LISTED_ON_DEVICES, Visible, chosen_on_devices, effective_top_k, index_cache
from ikpy.models.weights import WeightSource

OVERLAPPING = 4
"""The ratio whose stretches overlap and are chosen by indexers."""
LISTED_TOKENS = LISTED_ON_DEVICES
"""Of batches with more, chosen cells are attended to by a mask."""

Seen = tuple[CellRange, Visible]
"""With how many attended cells tokens see these."""


@dataclass
class Compressor:
    """kv, gate [D, w], bias [w, ratio] of the gates and norm [d]; w is d, or 2 d for stretches that overlap."""

    kv: Value
    gate: Value
    bias: Value
    norm: Value


@dataclass
class CompressedIndexer:
    """q_b reads the normed query latent, proj (a weight per head) the hidden states; keys are compressed as cells."""

    q_b: Value
    proj: Value
    keys: Compressor


@dataclass
class CompressedAttention:
    """Projections of a layer; out_a [d H / groups, rank, groups] and out_b [rank groups, D]."""

    q_a: Value
    q_a_norm: Value
    q_b: Value
    kv: Value
    kv_norm: Value
    sinks: Value
    out_a: Value
    out_b: Value
    compressor: Compressor | None = None
    indexer: CompressedIndexer | None = None


@dataclass(frozen=True)
class CompressedSizes:
    """Heads, elements of one and how many of them are rotated; window; of indexers heads, elements and chosen cells;
    the RoPE base of compressed layers.
    """

    n_heads: int
    size: int
    n_rot: int
    window: int
    index_heads: int
    index_size: int
    top_k: int
    freq_base: float

    def window_kind(self) -> Window:
        """The window of single tokens."""
        return "sliding", self.window

    def source_window(self, ratio: int) -> Window:
        """The window of the tokens that the next stretches are made of; that of attention, if it is as long."""
        needed = 2 * ratio if ratio == OVERLAPPING else ratio
        return "sliding", max(needed, self.window)


def take_compressor(weights: WeightSource, prefix: str, d: int, size: int, ratio: int) -> Compressor:
    """`prefix_compressor_kv` and its like."""
    width = size * (2 if ratio == OVERLAPPING else 1)
    return Compressor(
        kv=weights.take(f"{prefix}_compressor_kv.weight", (d, width)),
        gate=weights.take(f"{prefix}_compressor_gate.weight", (d, width)),
        bias=weights.take(f"{prefix}_compressor_ape.weight", (width, ratio)),
        norm=weights.take(f"{prefix}_compressor_norm.weight", (size,)),
    )


def compressed_caches(sizes: CompressedSizes, ratio: int, layer: int, params: GraphParams) -> list[CacheSpec]:
    """Single tokens ("kv"), compressed stretches behind them ("ke"), what stretches are made of, and index keys."""
    window, sources, every = sizes.window_kind(), sizes.source_window(ratio), (EVERY, ratio)
    specs = [CacheSpec("kv", sizes.size, 1, params.types_k[layer], window)]
    if not ratio:
        return specs
    parts = 2 if ratio == OVERLAPPING else 1
    specs.append(CacheSpec("ke", sizes.size, 1, params.types_k[layer], every, behind="kv"))
    specs += [CacheSpec(name, parts * sizes.size, 1, F32, sources) for name in ("cv", "cg")]
    if ratio == OVERLAPPING and effective_top_k(sizes.top_k, params):
        specs += [CacheSpec(name, parts * sizes.index_size, 1, F32, sources) for name in ("iv", "ig")]
        specs.append(index_cache(sizes.index_size, params, every))
    return specs


class CompressedLayer:
    """The graph of a layer's attention for one micro-batch. ratio: positions per compressed cell, 0 for none."""

    def __init__(
        self, b: BatchGraph, il: int, attn: CompressedAttention, sizes: CompressedSizes, ratio: int, norm_eps: float
    ) -> None:
        self.b, self.il, self.attn, self.sizes, self.ratio, self.norm_eps = b, il, attn, sizes, ratio, norm_eps
        self.rope = compressed_rope(b.params.rope, sizes, ratio)

    def attend(self, h: Value) -> Value:
        """Attention to hidden states h [D, T], before the output projections: [d H, T]."""
        b, g, sizes = self.b, self.b.graph, self.sizes
        table = b.rope_table(sizes.n_rot, self.rope)
        latent = self._norm(g.mul_mat(self.attn.q_a, h), self.attn.q_a_norm)
        q = g.mul_mat(self.attn.q_b, latent).reshape(sizes.size, sizes.n_heads, b.n_tokens)
        q = self._transformed(self._rotate(g.rms_norm(q, None, self.norm_eps), table))
        kv = self._norm(g.mul_mat(self.attn.kv, h), self.attn.kv_norm).reshape(sizes.size, 1, b.n_tokens)
        b.store(self.il, "kv", self._transformed(self._rotate(kv, table)))
        out = g.new(sizes.size, sizes.n_heads, b.n_tokens)
        for when, seen in self._compress(h, latent, table):
            with g.only(when):
                self._attend_to(seen, q, out)
        back = b.rope_table(sizes.n_rot, self.rope, inverse=True)
        return self._rotate(self._transformed(out), back).reshape(sizes.size * sizes.n_heads, b.n_tokens)

    def _attend_to(self, seen: Visible, q: Value, out: Value) -> None:
        """Sums of cells for queries q [d, H, T], into out."""
        b, cells = self.b, self._cells()
        b.graph.attention(
            q,
            [cells],
            cells,
            seen.mask,
            scale=self.sizes.size**-0.5,
            flash=b.params.flash_attn,
            heads_per_step=heads_per_step(b, self.sizes.n_heads),
            sinks=self.attn.sinks,
            dst=out,
            chosen=seen.chosen,
            common=seen.common,
        )

    def _norm(self, x: Value, weight: Value) -> Value:
        return self.b.graph.rms_norm(x, weight, self.norm_eps)

    def _rotate(self, x: Value, table: Value) -> Value:
        """The last elements of every head of x [d, H, T], in place."""
        return self.b.graph.rope(x, table, neox=False, offset=x.shape[0] - self.sizes.n_rot)

    def _transformed(self, x: Value) -> Value:
        """x [d, H, T] under the Hadamard transform that cached rows have, in place; the transform undoes itself."""
        block = hadamard_block(self.sizes.size) if self.b.params.k_hadamard else 0
        return self.b.graph.hadamard(x, block) if block else x

    def _cells(self) -> Value:
        """The cached tokens and behind them the compressed ones, as one."""
        if not self.ratio:
            return self.b.attended(self.il, "kv")
        kv = self.b.cache(self.il, "kv")
        behind = self.b.cache(self.il, "ke")
        n_cells = kv.shape[2] + behind.shape[2]
        return Value(kv.buffer, kv.type_id, (kv.shape[0], 1, n_cells, 1), kv.strides, kv.offset)

    # compressed cells

    def _compress(self, h: Value, latent: Value, table: Value) -> list[Seen]:
        """Stores the stretches that end with tokens of the batch; which cells each token sees, and when."""
        b, window = self.b, self.sizes.window_kind()
        if self.attn.compressor is None:
            return [(ALWAYS, Visible(b.mask(*window)))]
        self._store_stretches(self.attn.compressor, h, ("cv", "cg", "ke"))
        mask = b.mask(*window, stretch=(EVERY, self.ratio))
        if self.attn.indexer is None or not effective_top_k(self.sizes.top_k, b.params):
            return [(ALWAYS, Visible(mask))]
        self._store_stretches(self.attn.indexer.keys, h, ("iv", "ig", "ki"))
        return self._choose(self.attn.indexer, h, latent, table, mask)

    def _store_stretches(self, compressor: Compressor, h: Value, names: tuple[str, str, str]) -> None:
        """Keeps the projections of the tokens h [D, T], and compresses the stretches that end with them."""
        b, g, target = self.b, self.b.graph, names[2]
        size = compressor.norm.shape[0]
        sources = g.mul_mat(compressor.kv, h), g.mul_mat(compressor.gate, h)
        cells, starts, taken = compress_stretches(b, self.il, names[:2], sources, compressor.bias, size)
        table = b.rope_table(self.sizes.n_rot, self.rope, pos=starts)
        cells = self._rotate(self._norm(cells, compressor.norm).reshape(size, 1, cells.shape[1]), table)
        cells = self._transformed(cells) if target == "ke" else cells
        g.kv_store(cells, b.cache(self.il, target), taken)

    def _choose(
        self, indexer: CompressedIndexer, h: Value, latent: Value, table: Value, mask: tuple[Value, Value]
    ) -> list[Seen]:
        """The compressed cells with the best scores, and all of the window's; all while there are few.

        The positive factors of scores, n_heads^-1/2 and size^-1/2, are left out: only their order counts.
        """
        b, g, sizes = self.b, self.b.graph, self.sizes
        keys = b.cache(self.il, "ki")
        top_k = effective_top_k(sizes.top_k, b.params)
        every = [(ALWAYS, Visible(mask))]
        if top_k >= keys.shape[2] and g.collector is None:
            return every
        few = top_k * self.ratio  # tokens that have no more stretches than may be chosen
        # Statistics are those of all tokens; devices run everything whatever is attended to.
        with g.only(ALWAYS if g.collector or b.params.on_devices else CellRange(above=few)):
            q = g.mul_mat(indexer.q_b, latent).reshape(sizes.index_size, sizes.index_heads, b.n_tokens)
            weights = g.mul_mat(indexer.proj, h)
            if top_k >= keys.shape[2]:
                return every
            chosen = g.choose_cells(self._rotate(q, table), weights, keys, b.mask(EVERY, self.ratio), top_k)
            seen = self._chosen(mask, chosen)
        if b.params.on_devices:
            return [(ALWAYS, seen)]
        return [(CellRange(upto=few), every[0][1]), (CellRange(above=few), seen)]

    def _chosen(self, mask: tuple[Value, Value], chosen: Value) -> Visible:
        """Chosen compressed cells and those of the window that the mask shows: as lists of few tokens, or as a mask."""
        b, g = self.b, self.b.graph
        first = b.cache(self.il, "kv").shape[2]
        # The CPU lists no cells for tokens that see few, which devices could not tell from none.
        is_listed = not b.params.on_devices or chosen_on_devices(self.sizes.index_size)
        if is_listed and b.n_tokens <= LISTED_TOKENS:
            return Visible(mask, chosen=g.chosen_list(mask[0], chosen, first, self.sizes.window))
        return Visible((g.chosen_mask(mask[0], chosen, mask[0].shape[0], first), mask[1]), common=mask[0])


def compress_stretches(
    b: BatchGraph, il: int, names: tuple[str, str], sources: tuple[Value, Value], bias: Value, size: int
) -> tuple[Value, Value, Value]:
    """Stores values and gates [w, T] in the caches with these names. Of the stretches that end with tokens of the
    batch their compressed values [size, E], first positions, and cells, i32 [E], -1 where there are fewer.

    bias [w, ratio] of the gates; w is size, or 2 size for stretches that overlap.
    """
    for name, x in zip(names, sources, strict=True):
        b.store(il, name, x.reshape(x.shape[0], 1, b.n_tokens))
    return stored_stretches(b, il, names[0], b.cache(il, names[1]), bias, size)


def stored_stretches(
    b: BatchGraph, il: int, name: str, gates: Value, bias: Value, size: int
) -> tuple[Value, Value, Value]:
    """`compress_stretches` of values that are in the cache with that name, which has the gates [w, 1, cells]."""
    g, ratio = b.graph, bias.shape[1]
    every, n = (EVERY, ratio), min(b.n_tokens, b.n_tokens // ratio + b.params.n_seq_max)
    ends, starts = (x.slice0(0, n) for x in b.stretches[every])
    values = b.cache(il, name)
    _, cell_pos, cell_seq = b.cells[b.windows[il, name]]
    pos, seq = b.inputs["pos"], b.inputs["seq"]
    cells = g.compress_cells(values, gates, bias, cell_pos, cell_seq, pos, seq, ends, size, ratio)
    return cells, starts, b.cells[every][0].slice0(0, n)


def compressed_rope(rope: RopeParams, sizes: CompressedSizes, ratio: int) -> RopeParams:
    """RoPE of a layer: plain in those with the window only, else with another base and YaRN of magnitude 1."""
    if ratio:
        return replace(rope, freq_base=sizes.freq_base).without_magnitude()
    return replace(rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
