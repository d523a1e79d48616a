"""A tensor of a planned GGUF file, and what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ikpy.convert.families.base import Change, View


@dataclass(frozen=True)
class Part:
    """What one checkpoint tensor gives to a GGUF tensor; expert is its place in a stack, among shards or
    among columns, else None."""

    source: str
    view: View | None
    expert: int | None


@dataclass
class OutputTensor:
    """A GGUF tensor: parts, change of the values, kind of the sources, shape slowest dimension first; factors of the
    rows of a matrix; whether its columns are divided by their lengths; checkpoint tensor of as many elements that
    multiplies them, "" for none; how often the first row follows the last; whether parts are rows behind each other, or
    columns beside each other."""

    name: str
    change: Change | None
    kind: str
    parts: list[Part] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    row_factors: np.ndarray | None = None
    unit_columns: bool = False
    factor: str = ""
    n_repeated: int = 0
    is_sharded: bool = False
    joins_columns: bool = False


def pieces(array: np.ndarray, max_elements: int) -> Iterator[np.ndarray]:
    """The rows of an array [..., n] in order, as contiguous arrays [rows, n] of about max_elements."""
    if array.ndim > 2 and array.size > max_elements and not array.flags.c_contiguous:  # no copy of all of it
        for matrix in array:
            yield from pieces(matrix, max_elements)
        return
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, max_elements // max(1, rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        yield np.ascontiguousarray(rows[first : first + step])
