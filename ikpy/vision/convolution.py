"""Convolutions over 3 x 3 places, of which every second row and column is taken."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.graph.ir import F16, Value, external
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.weights import Linear, ProjectorWeights, value_of

Size = tuple[int, int]


def convolution(weights: ProjectorWeights, name: str, n_in: int) -> Linear:
    """Filters [3, 3, n_in, n_out] as a matrix [9 n_in, n_out] over neighbours side by side, and a bias."""
    n_out = weights.shape(f"{name}.weight")[-1]
    filters = weights.array(f"{name}.weight", (3, 3, n_in, n_out))
    matrix = np.ascontiguousarray(filters.transpose(0, 2, 3, 1)).reshape(n_out, 9 * n_in)
    weight = value_of(matrix, name)
    if weights.gguf.tensors[f"{name}.weight"].type_id == F16:
        half = matrix.astype(np.float16)
        weight = external(half.ctypes.data, half, F16, half.shape[::-1], name, "weight")
    bias = f"{name}.bias"
    has_bias = weights.has(bias)
    return Linear(weight, weights.table(bias, (n_out,), (1, 1, n_out)).reshape(n_out) if has_bias else None)


def convolved(b: PictureGraph, layer: Linear, x: Value, size: Size) -> Value:
    """Every second row and column of filters over x [D, rows * columns], which has zeros around it."""
    return filtered(b, layer, x, neighbour_places(*size))


def filtered(b: PictureGraph, layer: Linear, x: Value, places: NDArray[np.int32]) -> Value:
    """Filters over the rows of x [D, n] at nine places for each result, -1 where there are zeros."""
    neighbours = b.graph.get_rows(x, b.indices(places))
    return b.linear(layer, neighbours.reshape(9 * x.shape[0], len(places) // 9))


def neighbour_places(rows: int, columns: int) -> NDArray[np.int32]:
    """Places of the 3 x 3 around every second row and column, row by row, -1 where there is none: i32 [9 n]."""
    y, x, dy, dx = np.ix_(range(0, rows, 2), range(0, columns, 2), (-1, 0, 1), (-1, 0, 1))
    row, column = y + dy, x + dx
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return np.where(inside, row * columns + column, -1).astype(np.int32).reshape(-1)


def halved(n: int) -> int:
    """Every second one of n, the first among them."""
    return (n + 1) // 2


def rows_before(rows: range, count: int) -> range:
    """Rows, of so many, that every second of which makes some others with its neighbours."""
    return range(max(2 * rows.start - 1, 0), min(2 * rows.stop, count))


def places_before(rows: range, known: range, columns: int) -> NDArray[np.int32]:
    """Places of the 3 x 3 around what rows are made of, every second column of them, within known rows, -1 where there
    is none: i32 [n, 9]."""
    around = np.arange(-1, 2)
    y, x, dy, dx = np.ix_(np.arange(rows.start, rows.stop), np.arange(0, columns, 2), around, around)
    row, column = 2 * y + dy - known.start, x + dx
    inside = (row >= 0) & (row < len(known)) & (column >= 0) & (column < columns)
    return np.where(inside, row * columns + column, -1).astype(np.int32).reshape(-1, 9)
