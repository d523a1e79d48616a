"""Rotation of heads by two positions: one half of a head by the first, the other by the second."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph


def check_head_size(n: int, path: str) -> None:
    """FileFormatError for heads without two halves of whole pairs."""
    if n % 4:
        raise FileFormatError(f"{path}: heads of {n} elements cannot be rotated by two positions")


class AxialRotation:
    """Of heads [d, H, T]: elements 0 .. d/2 by first, the others by second, both [T] and with frequencies of their own
    half, base^(-4i/d).

    neox: pairs of elements i and i + d/4 of a half turn together, else 2i and 2i + 1.
    """

    def __init__(
        self, b: PictureGraph, head_size: int, first: NDArray[np.integer], second: NDArray[np.integer], base: float
    ) -> None:
        half = head_size // 2
        params = (base, 1.0, 0.0, 1.0, 0.0, 0.0)
        self._half = half
        self._tables = [b.graph.rope_table(b.indices(pos), half, None, params) for pos in (first, second)]

    def __call__(self, b: PictureGraph, heads: Value, *, neox: bool) -> Value:
        """The rotated heads, in place."""
        for i, table in enumerate(self._tables):
            heads = b.graph.rope(heads, table, neox=neox, offset=i * self._half)
        return heads


def places(rows: int, columns: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Row and column of every patch, row by row."""
    down, across = np.divmod(np.arange(rows * columns, dtype=np.int32), np.int32(columns))
    return down, across
