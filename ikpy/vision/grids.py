"""Grids of patches: the sizes of pictures that fit them, orders of patches, tables of their positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import UsageError

Ints = NDArray[np.intp]
F32 = np.float32

MAX_PATCHES = 1 << 18
"""Of a picture: each sees all others. More than any family wants by itself."""
MEASURED_PATCHES = 1 << 16
"""Of a picture that memory of a device is kept for: limits of some files are far above what anybody encodes."""


@dataclass(frozen=True)
class Limits:
    """Pixels that a picture has at least and at most."""

    least: int
    most: int

    def check(self, side: int, path: str) -> None:
        """UsageError if no picture is within them, a square of a side being a token."""
        if self.least > self.most:
            least, most = (n // side**2 for n in (self.least, self.most))
            raise UsageError(
                f"{path}: pictures of at least {least} and at most {most} tokens: change --image-min-tokens or "
                "--image-max-tokens"
            )


def _whole(x: np.float32) -> int:
    """The nearest integer, halves away from zero."""
    return math.floor(float(x) + 0.5)


def fitting_size(
    height: int, width: int, side: int, limits: Limits, longest_edge: int | None = None
) -> tuple[int, int]:
    """Height and width of whole squares of a side, nearly in the proportions of a picture and within the limits.

    longest_edge: of the picture before these count, None: its own. In single precision, as llama.cpp computes it: sizes
    must not differ at the borders.
    """
    if longest_edge is None:
        lines = tuple(max(_whole(F32(n) / F32(side)), 1) for n in (height, width))
    else:
        scale = min(F32(longest_edge) / F32(n) for n in (width, height))
        lines = tuple(math.ceil(F32(n) * scale / F32(side)) for n in (height, width))
    pixels = lines[0] * lines[1] * side * side
    area = F32(height) * F32(width)
    if pixels > limits.most:
        factor = np.sqrt(area / F32(limits.most))
        lines = tuple(max(math.floor(F32(n) / factor / F32(side)), 1) for n in (height, width))
    elif pixels < limits.least:
        factor = np.sqrt(F32(limits.least) / area)
        lines = tuple(math.ceil(F32(n) * factor / F32(side)) for n in (height, width))
    return lines[0] * side, lines[1] * side


def whole_picture_size(height: int, width: int, side: int, limits: Limits) -> tuple[int, int]:
    """Height and width of whole squares of a side that a picture lies in as it is, or enlarged or reduced to the limits
    in its proportions.
    """
    lines = -(-height // side), -(-width // side)
    if lines[0] * lines[1] * side * side < limits.least:
        factor = math.sqrt(limits.least / (height * width))
        lines = -(-math.ceil(height * factor) // side), -(-math.ceil(width * factor) // side)
    if lines[0] * lines[1] * side * side <= limits.most:
        return lines[0] * side, lines[1] * side
    best, low, high = (1, 1), 1, height
    while low <= high:  # for the largest height of the picture that fits
        inner = (low + high) // 2
        lines = -(-inner // side), -(-max(1, width * inner // height) // side)
        if lines[0] * lines[1] * side * side <= limits.most:
            best, low = lines, inner + 1
        else:
            high = inner - 1
    return best[0] * side, best[1] * side


def near_square(n: int, side: int) -> tuple[int, int]:
    """Rows and columns of patches, squares of a side of them, of a picture of n squares, or of one a little larger; of
    about MEASURED_PATCHES at most."""
    n = max(1, min(n, MEASURED_PATCHES // side**2))
    rows = math.isqrt(n)
    return rows * side, -(-n // rows) * side


# orders of patches


def square_order(rows: int, columns: int, side: int) -> Ints:
    """Patches square by square and line by line in each: where each lies in a grid read line by line.

    rows and columns are multiples of the side.
    """
    grid = np.arange(rows * columns).reshape(rows // side, side, columns // side, side)
    return grid.transpose(0, 2, 1, 3).reshape(-1)


def window_order(rows: int, columns: int, window: int) -> tuple[Ints, Ints]:
    """Cells of a grid window by window and line by line in each, and how many there are in every window."""
    grid = np.arange(rows * columns).reshape(rows, columns)
    parts = [
        grid[y : y + window, x : x + window].reshape(-1)
        for y in range(0, rows, window)
        for x in range(0, columns, window)
    ]
    return np.concatenate(parts), np.array([len(part) for part in parts])


def ranges_of(lengths: Ints) -> NDArray[np.int32]:
    """First token and the one behind the last of the stretch that each token lies in, int32 [T, 2]."""
    ends = np.cumsum(lengths)
    spans = np.stack([ends - lengths, ends], axis=1).astype(np.int32)
    return np.repeat(spans, lengths, axis=0)


# positions


def turned(place: Ints, rates: NDArray[np.floating]) -> NDArray[np.float32]:
    """(cos, sin) pairs float32 [T, 2 * pairs] of a rotation by positions [T] times the rates of pairs, for
    `Graph.rope`."""
    angles = place[:, None] * rates
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(len(angles), -1).astype(F32)


def axial_table(
    places: tuple[Ints, Ints], rates: tuple[NDArray[np.floating], NDArray[np.floating]]
) -> NDArray[np.float32]:
    """As `turned`, the first pairs by the first of two positions, the others by the second."""
    return np.concatenate([turned(place, rate) for place, rate in zip(places, rates, strict=True)], axis=1)


def _corner_shares(n: int, side: int) -> NDArray[np.float64]:
    """Shares [n, side] of the places of a line, linear between neighbours; its ends are those of the n."""
    at = np.linspace(0, side - 1, n)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(side)))


def _middle_shares(n: int, side: int) -> NDArray[np.float64]:
    """Shares [n, side] of the places of a line at the middles of n parts, cubic (a = -0.75), edges repeated."""
    a = -0.75
    middle = (np.arange(n) + 0.5) * side / n - 0.5
    places = np.floor(middle)[:, None] + np.arange(-1, 3)
    x = np.abs(middle[:, None] - places)
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
    shares = np.zeros((n, side))
    lines = np.broadcast_to(np.arange(n)[:, None], places.shape)
    np.add.at(shares, (lines, places.clip(0, side - 1).astype(int)), np.where(x <= 1, near, far))
    return shares


def _linear_shares(n: int, side: int, more: float = 0.0) -> NDArray[np.float64]:
    """Shares [n, side] of the places of a line at the middles of n parts, linear, edges repeated; the line has room for
    so much more than the parts."""
    middle = ((np.arange(n) + 0.5) * side / (n + more) - 0.5).clip(0, side - 1)
    return np.maximum(0, 1 - np.abs(middle[:, None] - np.arange(side)))


_SHARES: dict[str, Callable[[int, int], NDArray[np.float64]]] = {
    "corners": _corner_shares,
    "bicubic": _middle_shares,
    "linear": _linear_shares,
    "tenth": partial(_linear_shares, more=0.1),
}


def resampled(table: NDArray[np.float32], rows: int, columns: int, method: str) -> NDArray[np.float32]:
    """A table of positions [side, side, D] for a grid, [rows * columns, D].

    method: "corners", linear with the corners of the table at those of the grid, "linear" or "bicubic", as the
    interpolation of images, "tenth", linear for a grid that is larger by a tenth of a patch. By the others a grid of
    the table's size takes it as it is.
    """
    height, width, size = table.shape
    if (height, width) != (rows, columns) or method == "tenth":
        shares = _SHARES[method]
        table = np.tensordot(shares(rows, height).astype(F32), table, 1)
        table = np.einsum("cx,rxd->rcd", shares(columns, width).astype(F32), table, optimize=True)
    return table.reshape(rows * columns, size)
