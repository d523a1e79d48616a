"""Blocks of MobileNet-V5, which continues MobileNetV4 (arXiv:2404.10518): convolutions over states [C, rows * columns].

Norms are RMSNorm over the elements of a state. Zeros are around a grid, the odd one of them on the right and below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.convolution import convolution
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.weights import Linear, ProjectorWeights, value_of

EPS = 1e-6
ACTIVATION = "gelu"
MAX_BLOCKS = 256
MAX_WIDTH = 15
Size = tuple[int, int]


@dataclass
class Grid:
    """States [C, rows * columns], row by row."""

    states: Value
    size: Size


def reach(n: int, width: int, step: int) -> tuple[int, int, int]:
    """How many results filters give along a side of n, the first place that they read, and how many they read."""
    count = -(-n // step)
    whole = (count - 1) * step + width
    return count, -(max(whole - n, 0) // 2), whole


def places(at: NDArray[np.integer], across: NDArray[np.integer], size: Size) -> NDArray[np.int32]:
    """Places of states by rows and columns that are broadcast against each other, -1 beyond the edges."""
    rows, columns = size
    inside = (at >= 0) & (at < rows) & (across >= 0) & (across < columns)
    return np.where(inside, at * columns + across, -1).astype(np.int32).reshape(-1)


def filtered(b: PictureGraph, layer: Linear, x: Grid, step: int) -> Grid:
    """Filters over the 3 x 3 around every step-th state."""
    (rows, top, _), (columns, left, _) = (reach(n, 3, step) for n in x.size)
    at, across, i, j = np.ix_(range(rows), range(columns), range(3), range(3))
    around = places(top + at * step + i, left + across * step + j, x.size)
    neighbours = b.graph.get_rows(x.states, b.indices(around))
    return Grid(b.linear(layer, neighbours.reshape(9 * x.states.shape[0], rows * columns)), (rows, columns))


class Depthwise:
    """Filters [k, k] of every element by itself."""

    def __init__(self, weights: ProjectorWeights, name: str, n: int) -> None:
        self.width = weights.shape(name)[0]
        if self.width > MAX_WIDTH:
            raise FileFormatError(
                f"{weights.gguf.path}: filters '{name}' are {self.width} wide, at most {MAX_WIDTH} are possible"
            )
        filters = weights.array(name, (self.width, self.width, 1, n)).reshape(n, -1)
        self.rows = value_of(np.ascontiguousarray(filters.T), name)

    def build(self, b: PictureGraph, x: Grid, step: int) -> Grid:
        """Around every step-th state."""
        g, k, n = b.graph, self.width, x.states.shape[0]
        (rows, top, height), (columns, left, width) = (reach(side, k, step) for side in x.size)
        at, across = np.ix_(range(top, top + height), range(left, left + width))
        spread = g.get_rows(x.states, b.indices(places(at, across, x.size)))
        line = spread.strides[1]
        total: Value | None = None
        for i in range(k * k):
            start = line * (i // k * width + i % k)
            part = g.mul(
                spread.view((n, columns, rows), (line * step, line * width * step), start), self.rows.slice(1, i, 1)
            )
            total = part if total is None else g.add(total, part)
        assert total is not None
        return Grid(total.reshape(n, rows * columns), (rows, columns))


class NormedFilters:
    """Filters and the norm behind them: `{name}.conv.weight` and `{name}.bn.weight`, or as named."""

    def __init__(self, weights: ProjectorWeights, name: str, n: int, norm: str = "") -> None:
        self.filters = Depthwise(weights, name if norm else f"{name}.conv.weight", n)
        self.norm = weights.table(norm or f"{name}.bn.weight", (n,))

    def build(self, b: PictureGraph, x: Grid, step: int) -> Grid:
        """Around every step-th state."""
        found = self.filters.build(b, x, step)
        return Grid(normed(b, self.norm, found.states), found.size)


class Pointwise:
    """A matrix for every state and, if one is named, a norm behind it."""

    def __init__(self, weights: ProjectorWeights, name: str, norm: str, n_in: int) -> None:
        full = f"{name}.weight"
        self.n_out = weights.shape(full)[-1]
        matrix = weights.source.take(full, (1, 1, n_in, self.n_out), (n_in, self.n_out))
        self.matrix = Linear(matrix.reshape(n_in, self.n_out))
        self.norm = weights.table(f"{norm}.weight", (self.n_out,)) if norm else None

    def build(self, b: PictureGraph, x: Value) -> Value:
        return normed(b, self.norm, b.linear(self.matrix, x))


def normed(b: PictureGraph, weight: Value | None, x: Value) -> Value:
    """RMSNorm, nothing without a weight."""
    return x if weight is None else b.graph.rms_norm(x, weight, EPS)


class EdgeResidual:
    """3 x 3 filters to more elements and a matrix back."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int) -> None:
        self.expand = convolution(weights, f"{prefix}.conv_exp", n)
        self.norm = weights.table(f"{prefix}.bn1.weight", (self.expand.n_out,))
        self.project = Pointwise(weights, f"{prefix}.conv_pwl", f"{prefix}.bn2", self.expand.n_out)
        self.n_out = self.project.n_out

    def build(self, b: PictureGraph, x: Grid, step: int) -> Grid:
        inner = filtered(b, self.expand, x, step)
        states = self.project.build(b, b.activated(normed(b, self.norm, inner.states), ACTIVATION))
        if step == 1 and states.shape[0] == x.states.shape[0]:
            states = b.graph.add(states, x.states)
        return Grid(states, inner.size)


class InvertedResidual:
    """Filters of every element, a matrix to more elements, filters again and a matrix back; filters may be missing."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int, *, begins: bool) -> None:
        name = f"{prefix}.dw_start"
        self.start = NormedFilters(weights, name, n) if weights.has(f"{name}.conv.weight") else None
        self.expand = Pointwise(weights, f"{prefix}.pw_exp.conv", f"{prefix}.pw_exp.bn", n)
        name, inner = f"{prefix}.dw_mid", self.expand.n_out
        self.mid = NormedFilters(weights, name, inner) if weights.has(f"{name}.conv.weight") else None
        if begins and self.mid is None:
            raise FileFormatError(f"{weights.gguf.path}: tensor '{name}.conv.weight' not found, which begins a stage")
        self.project = Pointwise(weights, f"{prefix}.pw_proj.conv", f"{prefix}.pw_proj.bn", inner)
        self.n_out = self.project.n_out
        self.scale = layer_scale(weights, prefix, self.n_out)

    def build(self, b: PictureGraph, x: Grid, step: int) -> Grid:
        g, inner = b.graph, x
        if self.start is not None:
            inner = self.start.build(b, inner, 1)
        inner = Grid(b.activated(self.expand.build(b, inner.states), ACTIVATION), inner.size)
        if self.mid is not None:
            inner = self.mid.build(b, inner, step)
            inner = Grid(b.activated(inner.states, ACTIVATION), inner.size)
        states = self.project.build(b, inner.states)
        states = states if self.scale is None else g.mul(states, self.scale)
        if inner.size == x.size and states.shape[0] == x.states.shape[0]:
            states = g.add(states, x.states)
        return Grid(states, inner.size)


class Source:
    """Keys or values, one head of them: perhaps of every second state, after filters and a norm."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int) -> None:
        name = f"{prefix}.down_conv.weight"
        self.down = NormedFilters(weights, name, n, f"{prefix}.norm.weight") if weights.has(name) else None
        self.matrix = Pointwise(weights, f"{prefix}.proj", "", n)

    def build(self, b: PictureGraph, x: Grid) -> Value:
        """f32 [d, 1, T]."""
        if self.down is not None:
            x = self.down.build(b, x, 2)
        found = self.matrix.build(b, x.states)
        return found.reshape(found.shape[0], 1, found.shape[1])


class Attention:
    """All states see all, with many heads of queries for one of keys and values."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int) -> None:
        self.norm = weights.table(f"{prefix}.norm.weight", (n,))
        self.q = Pointwise(weights, f"{prefix}.attn.query.proj", "", n)
        self.k, self.v = (Source(weights, f"{prefix}.attn.{name}", n) for name in ("key", "value"))
        self.head = self.k.matrix.n_out
        if (
            self.v.matrix.n_out != self.head
            or self.q.n_out % self.head
            or (self.k.down is None) != (self.v.down is None)
        ):
            raise FileFormatError(
                f"{weights.gguf.path}: {prefix}.attn has queries, keys and values of {self.q.n_out}, {self.head} and "
                f"{self.v.matrix.n_out} elements"
            )
        self.out = Pointwise(weights, f"{prefix}.attn.output.proj", "", self.q.n_out)
        if self.out.n_out != n:
            raise FileFormatError(f"{weights.gguf.path}: {prefix}.attn makes {self.out.n_out} elements of {n}")
        self.n_out = n
        self.scale = layer_scale(weights, prefix, n)

    def build(self, b: PictureGraph, x: Grid, step: int) -> Grid:
        g = b.graph
        inner = Grid(normed(b, self.norm, x.states), x.size)
        q = self.q.build(b, inner.states)
        q = q.reshape(self.head, q.shape[0] // self.head, q.shape[1])
        found = b.attention(q, self.k.build(b, inner), self.v.build(b, inner), scale=self.head**-0.5)
        states = self.out.build(b, found)
        states = states if self.scale is None else g.mul(states, self.scale)
        return Grid(g.add(states, x.states), x.size)


Block = EdgeResidual | InvertedResidual | Attention


def layer_scale(weights: ProjectorWeights, prefix: str, n: int) -> Value | None:
    """Factors of what a block adds."""
    name = f"{prefix}.layer_scale.gamma"
    return weights.table(name, (n,), (1, 1, n)).reshape(n) if weights.has(name) else None


def stage(weights: ProjectorWeights, number: int, n: int) -> list[Block]:
    """The blocks of a stage that reads states of n elements; the first one leaves half of the rows and columns."""
    found = list(_blocks(weights, number, n))
    if not found or isinstance(found[0], Attention):
        raise FileFormatError(f"{weights.gguf.path}: no convolutions 'v.blk.{number}.0' begin a stage")
    return found


def _blocks(weights: ProjectorWeights, number: int, n: int) -> Iterator[Block]:
    for i in range(MAX_BLOCKS):
        prefix = f"v.blk.{number}.{i}"
        block: Block
        if weights.has(f"{prefix}.conv_exp.weight"):
            block = EdgeResidual(weights, prefix, n)
        elif weights.has(f"{prefix}.attn.query.proj.weight"):
            block = Attention(weights, prefix, n)
        elif weights.has(f"{prefix}.pw_exp.conv.weight") or weights.has(f"{prefix}.dw_start.conv.weight"):
            block = InvertedResidual(weights, prefix, n, begins=not i)
        else:
            if i:
                _refuse_behind(weights, number, i)
            return
        yield block
        n = block.n_out


def _refuse_behind(weights: ProjectorWeights, number: int, i: int) -> None:
    """FileFormatError for tensors of block i of a stage, which is of no known kind, or behind it."""
    block = re.compile(rf"v\.blk\.{number}\.(\d{{1,9}})\.")
    for name in weights.gguf.tensors:
        found = block.match(name)
        if found and int(found[1]) >= i:
            raise FileFormatError(f"{weights.gguf.path}: tensor '{name}' is of no known block")
