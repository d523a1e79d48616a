"""Matrices that are rearranged into row-interleaved types when a file is loaded (-rtr)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ikpy._native import core
from ikpy.gguf.reader import TensorInfo
from ikpy.machine import threads
from ikpy.quants import registry

# Looked up row by row: never repacked.
EMBEDDINGS = ("token_embd.", "per_layer_token_embd.", "token_types.", "position_embd.")
REPACK_STEP = 1 << 24
"""Bytes of a tensor that one thread rearranges at a time."""


def interleaved_type(info: TensorInfo, parts: Sequence[int] = ()) -> registry.TensorType | None:
    """The row-interleaved type that a matrix, or parts of so many rows of it, can be rearranged into without loss."""
    name = registry.repack_target(registry.by_id(info.type_id).name)
    # F16 would lose precision as BF16_R16, and needs no rearrangement: its rows are read as they are.
    if not name or name == "bf16_r16" or len(info.shape) < 2 or info.name.startswith(EMBEDDINGS):
        return None
    target = registry.by_name(name)
    return target if target.keeps_apart((info.shape[1], *parts)) and core.has_decoder(target.id) else None


def interleaved_sizes(infos: Iterable[TensorInfo]) -> list[int]:
    """Bytes of each tensor that may be rearranged, once it is."""
    targets = [(info, interleaved_type(info)) for info in infos]
    return [target.tensor_nbytes(info.shape) for info, target in targets if target]


def repack_parallel(
    data: np.ndarray, type_id: int, target: registry.TensorType, shape: Sequence[int], out: np.ndarray
) -> None:
    """Bytes of a tensor rearranged into its row-interleaved type, into ``out`` (uint8), by all physical cores."""
    n_rows = math.prod(shape[1:])
    row_in, row_out = registry.by_id(type_id).row_nbytes(shape[0]), target.row_nbytes(shape[0])
    step = max(1, REPACK_STEP // (row_in * target.interleave)) * target.interleave

    def convert(first: int) -> None:
        last = min(first + step, n_rows)
        rows = data[first * row_in : last * row_in]
        out[first * row_out : last * row_out] = core.repack(rows, type_id, target.id, shape[0], last - first)

    with threads.pool(threads.physical_cores()) as pool:
        for _ in pool.map(convert, range(0, n_rows, step)):
            pass
