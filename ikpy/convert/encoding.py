"""Rows of checkpoint tensors as bytes of GGUF types."""

from __future__ import annotations

import numpy as np

from ikpy.convert.families.base import Change
from ikpy.convert.output_tensor import pieces
from ikpy.convert.words import to_float32
from ikpy.errors import FileFormatError
from ikpy.machine.threads import hardware_threads
from ikpy.quants import registry
from ikpy.quants.finite import surely_finite

PIECE_ELEMENTS = 1 << 22
_SHORTEST = 1e-7


def multiplied(factors: np.ndarray) -> Change:
    """Values times as many factors."""
    return lambda values: values * factors.reshape(values.shape)


def scaled_rows(factors: np.ndarray) -> Change:
    """Rows times a factor each."""
    return lambda values: values * factors[:, None]


def column_lengths(matrix: np.ndarray, kind: str) -> np.ndarray:
    """Lengths f32 [ne0] of the columns of a matrix [n, ne0] of a kind, at least _SHORTEST."""
    squares = np.zeros(matrix.shape[-1])
    for rows in pieces(matrix, PIECE_ELEMENTS):
        squares += np.square(to_float32(rows, kind), dtype=np.float64).sum(axis=0)
    return np.maximum(np.sqrt(squares), _SHORTEST).astype(np.float32)


def unit_columns(lengths: np.ndarray) -> Change:
    """Columns divided by their lengths."""
    return lambda values: values / lengths


def encode(rows: np.ndarray, kind: str, target: str, change: Change | None, name: str) -> np.ndarray:
    """Rows [n, ne0] of a kind as bytes of a type. FileFormatError for values that are not finite or do not fit."""
    if kind == target and change is None:
        if not _is_finite(rows.view(np.uint8).reshape(-1), target, registry.by_name(target).block_elements):
            raise _not_finite(name)
        return rows.view(np.uint8)
    values = to_float32(rows, kind)
    if change is not None:
        values = change(values)
    if not np.isfinite(values).all():
        raise _not_finite(name)
    if target == "f32":
        return values.view(np.uint8)
    from ikpy._native import core

    coded = np.asarray(core.quantize(values, registry.by_name(target).id, None, hardware_threads()))
    if not _is_finite(coded, target, values.shape[-1]):
        wider = "f32" if target == "bf16" else "bf16"
        raise FileFormatError(f"tensor '{name}' has values beyond the range of {target}; use --outtype {wider}")
    return coded


def _is_finite(data: np.ndarray, target: str, ne0: int) -> bool:
    """Whether rows of a type, uint8 [nbytes], hold finite values alone."""
    from ikpy._native import core

    row = registry.by_name(target)
    if surely_finite(data, row, ne0):
        return True
    return bool(np.isfinite(core.dequantize(data, row.id, ne0, len(data) // row.row_nbytes(ne0))).all())


def _not_finite(name: str) -> FileFormatError:
    return FileFormatError(f"tensor '{name}' contains NaN or infinite values; the checkpoint is damaged")
