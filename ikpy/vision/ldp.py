"""MobileVLM 1 (arXiv:2312.16886) and 2 (arXiv:2402.03766): as LLaVA, a quarter of its rows made by convolutions."""

from __future__ import annotations

import numpy as np

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.llava import LlavaProjector
from ikpy.vision.mobilenet import Depthwise, Grid, Size
from ikpy.vision.weights import Linear, Mlp, Norm, ProjectorWeights


class LdpV2Projector(LlavaProjector):
    """Means of squares of states, and filters over them that tell places apart (MobileVLM 2)."""

    def load_projection(self, weights: ProjectorWeights, n_in: int) -> None:
        self.mlp = weights.mlp("mm.model.mlp.0", "mm.model.mlp.2", n_in)
        n = self.mlp.n_out
        self.filters = Depthwise(weights, "mm.model.peg.0.weight", n)
        self.bias = weights.table("mm.model.peg.0.bias", (n,))

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    def project(self, b: PictureGraph, x: Value) -> Value:
        x = b.mean_pooled(b.mlp(self.mlp, x, "gelu_erf"), 2)
        around = self.filters.build(b, Grid(x, (b.rows // 2, b.columns // 2)), 1).states
        return b.graph.add(b.graph.add(around, self.bias), x)


class LdpProjector(LlavaProjector):
    """Two blocks of MobileNet (MobileVLM 1), the second of which takes every second row and column."""

    def load_projection(self, weights: ProjectorWeights, n_in: int) -> None:
        self.mlp = weights.mlp("mm.model.mlp.1", "mm.model.mlp.3", n_in)
        n, eps = self.mlp.n_out, self.params.eps
        # What the first block makes is added to what it reads.
        self.whole = MobileBlock(weights, "mm.model.mb_block.1.block", n, eps, n_out=n)
        self.halving = MobileBlock(weights, "mm.model.mb_block.2.block", n, eps)

    @property
    def n_out(self) -> int:
        return self.halving.matrix.n_out

    def project(self, b: PictureGraph, x: Value) -> Value:
        x, size = b.mlp(self.mlp, x, "gelu_erf"), (b.rows, b.columns)
        x = b.graph.add(self.whole.build(b, x, size, 1), x)
        return self.halving.build(b, x, size, 2)


class MobileBlock:
    """Filters of every element by itself, factors of elements by their means, one matrix."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int, eps: float, *, n_out: int | None = None) -> None:
        self.eps = eps
        self.filters = Depthwise(weights, f"{prefix}.0.0.weight", n)
        self.filter_norm: Norm = weights.norm(f"{prefix}.0.1", n)
        first = weights.linear(f"{prefix}.1.fc1", n)
        self.factors = Mlp(first, weights.linear(f"{prefix}.1.fc2", first.n_out, n))
        self.matrix: Linear = weights.linear(f"{prefix}.2.0", n, n_out)
        self.norm: Norm = weights.norm(f"{prefix}.2.1", self.matrix.n_out)

    def build(self, b: PictureGraph, x: Value, size: Size, step: int) -> Value:
        """Of every step-th of the states [n, rows * columns]."""
        g, (rows, columns) = b.graph, size
        x = self.filters.build(b, Grid(x, size), 1).states
        if step > 1:
            places = np.arange(rows * columns).reshape(size)[::step, ::step]
            rows, columns = places.shape
            x = g.get_rows(x, b.indices(places.reshape(-1)))
        x = b.layer_norm(self.filter_norm, x, self.eps)
        x = g.mul(x, ramp(b, x))
        factors = ramp(b, b.mlp(self.factors, mean_of_all(b, x, rows, columns), "relu"))
        return b.layer_norm(self.norm, b.linear(self.matrix, g.mul(x, factors)), self.eps)


def ramp(b: PictureGraph, x: Value) -> Value:
    """From 0 below -3 to 1 above 3."""
    return b.bounded(b.graph.scale(x, 1 / 6, 0.5), (0.0, 1.0))


def mean_of_all(b: PictureGraph, x: Value, rows: int, columns: int) -> Value:
    """Means [n, 1] of the states [n, rows * columns] of a square."""
    side, factor = rows, 2
    while side > 1:
        if side % factor:
            factor += 1
            continue
        x = b.mean_pooled(x, factor, rows=side, columns=side)
        side //= factor
    return x
