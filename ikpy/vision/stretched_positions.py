"""Patch embeddings whose table of positions is stretched to the grid of a picture, as SigLIP 2 does (NaFlex)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.params import VisionParams
from ikpy.vision.weights import ProjectorWeights


class StretchedEmbedding:
    """x = patches W + b plus the position of each."""

    def __init__(self, weights: ProjectorWeights, params: VisionParams) -> None:
        n, name = params.n_embd, "v.position_embd.weight"
        self.filters = weights.filters("v.patch_embd.weight", params.patch_size, n)
        self.bias = weights.vector("v.patch_embd.bias", n)
        table = weights.array(name)
        side = math.isqrt(len(table))
        if table.shape != (side**2, n):
            raise FileFormatError(f"{weights.gguf.path}: tensor '{name}' holds no square of positions of {n} elements")
        self.table = table.reshape(side, side, n)

    def build(self, b: PictureGraph) -> Value:
        """f32 [D, n]."""
        x = b.graph.mul_mat(self.filters, b.patches, self.bias)
        return b.graph.add(x, b.floats(self.positions(b.rows, b.columns)))

    def positions(self, rows: int, columns: int) -> NDArray[np.float32]:
        """The table for a grid, [rows * columns, D]."""
        return antialiased(self.table, rows, columns)


def antialiased(table: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """A table [side, side, D] in another size by triangular filters as wide as the scale: [rows * columns, D]."""
    height, width, n = table.shape
    if (height, width) == (rows, columns):
        return table.reshape(rows * columns, n)
    down = np.tensordot(triangles(rows, height), table, 1)
    stretched = np.einsum("cx,rxd->rcd", triangles(columns, width), down, optimize=True)
    return stretched.astype(np.float32).reshape(rows * columns, n)


def triangles(n: int, side: int) -> NDArray[np.float64]:
    """Shares [n, side] of the places of a line in each of n."""
    scale = side / n
    centre, reach = (np.arange(n) + 0.5) * scale, max(scale, 1.0)
    shares = np.maximum(0, 1 - np.abs(np.arange(side) + 0.5 - centre[:, None]) / reach)
    return shares / shares.sum(1, keepdims=True)
