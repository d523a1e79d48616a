"""The encoder of Segment Anything (arXiv:2304.02643): windows in most layers, distances of rows and columns in scores.

score(i, j) = q_i k_j / sqrt(d) + q_i R[row_i - row_j] + q_i C[column_i - column_j]. What a query has for every row and
column stands behind its elements, and behind those of a key which row and column it is, so that one product is both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.keys import MAX_LAYERS, Keys
from ikpy.models.weights import split_rows
from ikpy.vision.convolution import convolution, filtered, halved, neighbour_places
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import ranges_of
from ikpy.vision.params import size
from ikpy.vision.weights import Linear, ProjectorWeights

EPS = 1e-6
PATCH = 16
WIDTHS = ((128, 128), (192, 128), (256, 256))
"""Elements of keys and of values that kernels of devices know."""


class SamLayer:
    """Weights of a layer. rows, columns: vectors [2 n - 1, d] of distances, the largest first."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int, head: int) -> None:
        fused = weights.linear(f"{prefix}.attn.qkv", n, 3 * n)
        parts = split_rows(fused.weight, n, n, n)
        self.q, self.k, self.v = (
            Linear(part, None if fused.bias is None else fused.bias.slice0(i * n, n)) for i, part in enumerate(parts)
        )
        self.out = weights.linear(f"{prefix}.attn.out", n, n)
        self.ln1, self.ln2 = weights.norm(f"{prefix}.pre_ln", n), weights.norm(f"{prefix}.post_ln", n)
        self.up = weights.linear(f"{prefix}.mlp.lin1", n)
        self.down = weights.linear(f"{prefix}.mlp.lin2", self.up.n_out, n)
        names = f"{prefix}.attn.pos_h.weight", f"{prefix}.attn.pos_w.weight"
        self.rows, self.columns = (weights.array(name, (head, weights.shape(name)[1])) for name in names)


class SamEncoder:
    """Patches of 16 pixels, layers, and convolutions that leave a quarter of the rows and columns."""

    def __init__(self, weights: ProjectorWeights, keys: Keys) -> None:
        self.path = weights.gguf.path
        n = self.n = size(keys, "sam.embedding_length")
        heads = size(keys, "sam.head_count")
        if n % heads:
            raise FileFormatError(f"{self.path}: clip.vision.sam.embedding_length {n} is no multiple of {heads} heads")
        self.head = n // heads
        self.window = size(keys, "window_size")
        self.filters = weights.filters("v.sam.patch_embd.weight", PATCH, n)
        self.bias = weights.vector("v.sam.patch_embd.bias", n)
        name = "v.sam.pos_embd.weight"
        side = weights.shape(name)[1]
        self.positions = weights.array(name, (n, side, side))
        count = size(keys, "sam.block_count", most=MAX_LAYERS)
        self.layers = [SamLayer(weights, f"v.sam.blk.{il}", n, self.head) for il in range(count)]
        name = "v.sam.neck.0.weight"
        n_neck = weights.shape(name)[-1]
        self.first = Linear(weights.source.take(name, (1, 1, n, n_neck), (n, n_neck)).reshape(n, n_neck))
        self.norms = [weights.norm(f"v.sam.neck.{i}", n_neck) for i in (1, 3)]
        self.filtering = convolution(weights, "v.sam.neck.2", n_neck)
        self.halving = [convolution(weights, "v.sam.net_2", n_neck)]
        self.halving.append(convolution(weights, "v.sam.net_3", self.halving[0].n_out))

    @property
    def n_out(self) -> int:
        """Elements of a state."""
        return self.halving[-1].n_out

    def build(self, b: PictureGraph, side: int, count: int) -> Value:
        """f32 [n_out, count * (side / 4)²] of so many squares of side x side patches, one after the other."""
        g = b.graph
        x = g.mul_mat(self.filters, b.patches, self.bias)
        x = g.add(x, b.floats(np.tile(smoothed(self.positions, side), (count, 1))))
        whole, windows = Squares(b, side, count, self.head), Windows(b, side, self.window, count, self.head)
        for layer in self.layers:
            states = b.layer_norm(layer.ln1, x, EPS)
            is_local = len(layer.rows) == 2 * self.window - 1
            x = g.add(x, windows.attention(b, layer, states) if is_local else whole.attention(b, layer, states))
            inner = b.activated(b.linear(layer.up, b.layer_norm(layer.ln2, x, EPS)), "gelu_erf")
            x = g.add(x, b.linear(layer.down, inner))
        x = b.layer_norm(self.norms[0], b.linear(self.first, x), EPS)
        x = filtered(b, self.filtering, x, of_all(every_place(side), side, count))
        x = b.layer_norm(self.norms[1], x, EPS)
        for halving in self.halving:
            x = filtered(b, halving, x, of_all(neighbour_places(side, side), side, count))
            side = halved(side)
        return x


class Squares:
    """Squares of side x side states after each other, each of which sees itself; what all layers share of them."""

    def __init__(self, b: PictureGraph, side: int, count: int, head: int) -> None:
        self.side, self.head, self.n = side, head, count * side**2
        self.k, self.v = next(
            ((k, v) for k, v in WIDTHS if k >= head + 2 * side and v >= head), (head + 2 * side, head)
        )
        place = np.arange(self.n) % side**2
        named = np.zeros((self.n, self.k - head), np.float32)
        named[np.arange(self.n), place // side] = named[np.arange(self.n), side + place % side] = 1
        self.named = self.each(b, named)
        """Behind the elements of keys: which row and column they have."""
        self.zeros = [self.each(b, np.zeros((self.n, n))) for n in (self.k - head - 2 * side, self.v - head)]
        """Behind those of queries and of values."""
        self.ranges = ranges_of(np.full(count, side**2))
        orders = (np.argsort(index, kind="stable") for index in (place // side, place % side))
        self.orders = [(b.indices(order), b.indices(np.argsort(order))) for order in orders]

    def each(self, b: PictureGraph, values: NDArray[np.floating]) -> Value | None:
        """A constant [n, 1, T] that stands in all heads; None for none."""
        n = values.shape[1]
        return b.floats(values).reshape(n, 1, self.n) if n else None

    def attention(self, b: PictureGraph, layer: SamLayer, x: Value) -> Value:
        """Attention of x [D, T], behind its output matrix."""
        g, d, side = b.graph, self.head, self.side
        heads, scale = x.shape[0] // d, d**-0.5
        q, k, v = (b.linear(part, x) for part in (layer.q, layer.k, layer.v))
        query, key = self.widened(b, q, self.k, self.zeros[0]), self.widened(b, k, self.k, self.named)
        for i, table in enumerate((layer.rows, layer.columns)):
            known = g.scale(self.distances(b, q, distances_of(table, side), *self.orders[i]), 1 / scale)
            g.copy(known, query.slice0(d + i * side, side))
        value = self.widened(b, v, self.v, self.zeros[1])
        found = b.attention(query, key, value, scale=scale, ranges=self.ranges).reshape(self.v, heads, self.n)
        return b.linear(layer.out, g.copy(found.slice0(0, d), g.new(d, heads, self.n)).reshape(d * heads, self.n))

    def widened(self, b: PictureGraph, x: Value, n: int, last: Value | None) -> Value:
        """Heads f32 [n, H, T] of x [D, T] with a constant at their ends."""
        g, d = b.graph, self.head
        heads = x.shape[0] // d
        wide = g.new(n, heads, self.n)
        g.copy(x.reshape(d, heads, self.n), wide.slice0(0, d))
        for head in range(heads if last is not None else 0):
            assert last is not None
            size = last.shape[0]
            g.copy(last, wide.slice(1, head, 1).slice0(n - size, size))
        return wide

    def distances(self, b: PictureGraph, q: Value, table: NDArray[np.float32], order: Value, back: Value) -> Value:
        """Products f32 [side, H, T] of every head of q [D, T] with the vectors of its distances to all rows, or
        columns. table: [2 side - 1, d], the largest distance first; order: states by rows, or columns; back: undoes
        it."""
        g, d, side = b.graph, self.head, self.side
        heads, each = q.shape[0] // d, self.n // side
        rows, vectors = g.get_rows(q, order), b.floats(table)
        found = g.new(side * heads, self.n)
        for i in range(side):
            part = rows.slice(1, i * each, each).reshape(d, heads * each)
            dst = found.slice(1, i * each, each).reshape(side, heads * each)
            g.mul_mat(vectors.slice(1, side - 1 - i, side), part, dst=dst)
        return g.get_rows(found, back).reshape(side, heads, self.n)


class Windows:
    """The windows of squares; beyond the edges are states of zeros."""

    def __init__(self, b: PictureGraph, side: int, window: int, count: int, head: int) -> None:
        self.squares = Squares(b, window, count * (-(-side // window)) ** 2, head)
        self.places, self.back = (b.indices(places) for places in window_places(side, window, count))

    def attention(self, b: PictureGraph, layer: SamLayer, x: Value) -> Value:
        """As that of squares, for x [D, T] of these."""
        found = self.squares.attention(b, layer, b.graph.get_rows(x, self.places))
        return b.graph.get_rows(found, self.back)


def distances_of(table: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """Vectors [2 side - 1, d] of distances, the largest first, of a table with the smallest first and of any length."""
    n, wanted = len(table), 2 * side - 1
    if n != wanted:
        at = ((np.arange(wanted) + 0.5) * n / wanted - 0.5).clip(0, n - 1)
        shares = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(n)))
        table = (shares @ table).astype(np.float32)
    return table[::-1]


def window_places(side: int, window: int, count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Places of the states of all windows of squares, window by window, -1 beyond the edges; and of all states in that
    order."""
    across = -(-side // window)
    y, x, i, j = np.ix_(range(across), range(across), range(window), range(window))
    row, column = y * window + i, x * window + j
    places = np.where((row < side) & (column < side), row * side + column, -1).reshape(-1)
    everywhere = of_all(places.astype(np.int32), side, count)
    back = np.empty(count * side**2, np.int32)
    inside = np.flatnonzero(everywhere >= 0)
    back[everywhere[inside]] = inside
    return everywhere, back


def every_place(side: int) -> NDArray[np.int32]:
    """Places of the 3 x 3 around every state, -1 where there is none: i32 [9 side²]."""
    y, x, dy, dx = np.ix_(range(side), range(side), (-1, 0, 1), (-1, 0, 1))
    row, column = y + dy, x + dx
    inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
    return np.where(inside, row * side + column, -1).astype(np.int32).reshape(-1)


def of_all(places: NDArray[np.int32], side: int, count: int) -> NDArray[np.int32]:
    """Places within a square of side x side, for so many squares after each other."""
    starts = np.arange(count, dtype=np.int32)[:, None] * side**2
    return np.where(places < 0, -1, places + starts).astype(np.int32).reshape(-1)


def smoothed(table: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """A table [n, n, D] in another size, [side * side, D], by cubic filters (a = -0.5) as wide as the scale."""
    n = len(table)
    if n == side:
        return table.reshape(side * side, -1)
    shares = cubic_shares(side, n)
    return np.einsum("rn,cm,nmd->rcd", shares, shares, table, optimize=True).astype(np.float32).reshape(side**2, -1)


def cubic_shares(side: int, n: int) -> NDArray[np.float64]:
    """Shares [side, n] of the places of a line in each of side others."""
    a, scale = -0.5, n / side
    centre, stretch = (np.arange(side) + 0.5) * scale, max(scale, 1.0)
    x = np.abs(np.arange(n) + 0.5 - centre[:, None]) / stretch
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
    shares = np.where(x < 1, near, np.where(x < 2, far, 0))
    return shares / shares.sum(1, keepdims=True)
