"""Pictures cut into tiles that an encoder reads one by one, and the sizes that they are brought to first."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ikpy.vision.images import Pixels
from ikpy.vision.resize import Size, padded, stretched

F32 = np.float32


def rows_of_tiles(image: Pixels, tile: Size) -> list[list[Pixels]]:
    """Tiles of one size, row by row."""
    height, width = tile
    return [
        [image[y : y + height, x : x + width] for x in range(0, image.shape[1], width)]
        for y in range(0, image.shape[0], height)
    ]


def fitting(size: Size, room: Size) -> Size:
    """The size in its own proportions that fills the room."""
    scale = min(F32(room[1]) / F32(size[1]), F32(room[0]) / F32(size[0]))
    return int(F32(size[0]) * scale), int(F32(size[1]) * scale)


def best_resolution(size: Size, candidates: Iterable[Size]) -> Size:
    """The candidate that keeps most pixels of a picture and, of those, wastes least room; the first of equal ones."""
    best, kept, wasted = (0, 0), -1, 0
    for room in candidates:
        inner = fitting(size, room)
        effective = min(inner[0] * inner[1], size[0] * size[1])
        waste = room[0] * room[1] - effective
        if effective > kept or (effective == kept and waste < wasted):
            best, kept, wasted = room, effective, waste
    return best


def tiled(image: Pixels, side: int, candidates: Iterable[Size]) -> tuple[Pixels, list[list[Pixels]]]:
    """The whole picture stretched to a square, and its tiles row by row, of the best of several sizes with black bars.

    A picture that is no larger than a tile has none.
    """
    whole = stretched(image, (side, side), "bicubic")
    if max(image.shape[:2]) <= side:
        return whole, []
    refined = best_resolution(image.shape[:2], candidates)
    return whole, rows_of_tiles(padded(image, refined, "bicubic"), (side, side))


def closest_grid(size: Size, tile: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of the grid of least to most tiles nearest to the proportions of a picture.

    Of equal ones the one with fewest tiles, or a larger one that the picture fills by more than half.
    """
    ratio = F32(size[1]) / F32(size[0])
    best, nearest = (1, 1), F32(np.inf)
    for rows, columns in _grids(least, most):
        difference = abs(ratio - F32(columns) / F32(rows))
        fills = F32(size[0] * size[1]) > F32(0.5) * F32(tile * tile * rows * columns)
        if difference < nearest or (difference == nearest and fills):
            best, nearest = (rows, columns), difference
    return best


def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Grids (rows, columns) of least to most tiles, by the number of tiles, then by the columns."""
    counts = range(1, most + 1)
    found = [(rows, columns) for columns in counts for rows in counts if least <= rows * columns <= most]
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def least_enlarged(size: Size, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of the grid of at most so many tiles that a picture is least enlarged for, or least reduced."""
    grids = _grids(1, most)
    scales = [min(columns * side / size[1], rows * side / size[0]) for rows, columns in grids]
    large = [i for i, scale in enumerate(scales) if scale >= 1]
    return grids[min(large, key=lambda i: scales[i]) if large else max(range(len(grids)), key=lambda i: scales[i])]
