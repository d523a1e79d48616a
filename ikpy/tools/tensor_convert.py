"""Conversion of one tensor's data between types, a piece of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np

from ikpy.errors import FileFormatError, ResourceError, UnsupportedError, UsageError
from ikpy.machine.threads import hardware_threads
from ikpy.quants import registry
from ikpy.quants.codec import dequantize
from ikpy.quants.finite import surely_finite
from ikpy.quants.registry import TensorType

# Float values held at a time: 16 MiB of floats keep all threads busy and memory small.
PIECE_ELEMENTS = 1 << 22
_PIECE_BYTES = 1 << 24
# Rows are read by several threads if each gets so many values.
_PART_ELEMENTS = 1 << 18


def _core() -> ModuleType:
    """The native core; imported late because planning alone does not need it."""
    from ikpy._native import core

    return core


def can_encode(type_name: str) -> bool:
    """Whether floats can be converted to this type."""
    return type_name == "f32" or bool(_core().can_quantize(registry.by_name(type_name).id))


def repack_target(type_name: str) -> str:
    """Interleaved type that repacking gives on this machine, or "" (F16 and BF16 need AVX512-BF16)."""
    target = registry.repack_target(type_name)
    if target == "bf16_r16":
        from ikpy._native import cpu

        return target if cpu.features()["avx512bf16"] else ""
    return target


def convert_rows(
    data: np.ndarray,
    source: str,
    target: str,
    shape: Sequence[int],
    *,
    name: str = "",
    imatrix: np.ndarray | None = None,
    n_threads: int = 0,
    symmetric_q4_0: bool = False,
    skip: int = 0,
) -> Iterator[np.ndarray]:
    """Bytes of the tensor in type ``target``, in pieces of whole row groups, without the first ``skip`` bytes.

    data: uint8 bytes of type ``source``, shape ne0 first. imatrix: float32 [matrices, ne0] or None. skip: whole pieces,
    which are not computed. n_threads: 0 = all hardware threads. The order of rows is kept, interleaved groups never
    straddle matrices. FileFormatError names tensor and row of a NaN or infinite value, UnsupportedError those of one
    beyond the range of ``target``, ResourceError a tensor for which there is too little memory.
    """
    if source == target:
        yield from _copy(data, registry.by_name(source), shape, name, skip)
        return
    n_threads = n_threads or hardware_threads()
    read, write = registry.by_name(source), registry.by_name(target)
    ne0, rows = shape[0], int(shape[1]) if len(shape) > 1 else 1
    matrices = int(np.prod(shape[2:], dtype=np.int64))
    is_repack = registry.repack_target(source) == target
    for matrix in range(matrices):
        weights = None if imatrix is None else np.ascontiguousarray(imatrix[matrix % len(imatrix)], np.float32)
        for first, count in _pieces(read, write, ne0, rows):
            nbytes = write.row_nbytes(ne0) * count
            if skip:
                if skip < nbytes:
                    raise ValueError(f"{skip} bytes of tensor {name} to be left out are no whole piece")
                skip -= nbytes
                continue
            start = matrix * rows + first
            if is_repack:
                _check_stored(data, read, shape, start, count, name)
                coded = _repack_rows(data, read, write, ne0, start, count)
            else:
                values = _read_checked(data, read, shape, start, count, name, n_threads)
                if target == "f32":
                    yield np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
                    continue
                is_symmetric = target == "q4_0" and symmetric_q4_0
                coded = _symmetric_q4_0(values) if is_symmetric else encode(values, write, weights, n_threads, name)
            _check_encoded(coded, write, ne0, range(start, start + count), name)
            yield coded


def encode(values: np.ndarray, write: TensorType, weights: np.ndarray | None, n_threads: int, name: str) -> np.ndarray:
    """Rows float32 [n, ne0] as bytes of a type. ResourceError naming the tensor if there is too little memory."""
    try:
        return np.asarray(_core().quantize(values, write.id, weights, n_threads))
    except MemoryError:
        raise ResourceError(
            f"not enough memory to encode tensor {name} as {write.name} with {n_threads} threads"
        ) from None


def _copy(data: np.ndarray, row: TensorType, shape: Sequence[int], name: str, skip: int) -> Iterator[np.ndarray]:
    """The bytes as they are, checked on the way."""
    if not len(data):
        return
    ne0 = shape[0]
    n_rows = int(np.prod(shape[1:], dtype=np.int64))
    if row.tensor_extra_bytes:  # the scale lies behind all rows
        _check_stored(data, row, shape, 0, n_rows, name)
        for first in range(skip, len(data), _PIECE_BYTES):
            yield data[first : first + _PIECE_BYTES]
        return
    step = max(1, PIECE_ELEMENTS // (ne0 * row.interleave)) * row.interleave
    for first in range(skip // row.row_nbytes(ne0), n_rows, step):
        count = min(step, n_rows - first)
        _check_stored(data, row, shape, first, count, name)
        yield _rows_of(data, row, ne0, first, count)


def _rows_of(data: np.ndarray, row: TensorType, ne0: int, first: int, count: int) -> np.ndarray:
    """The bytes of rows, counted through all matrices."""
    row_nbytes = row.row_nbytes(ne0)
    return data[first * row_nbytes : (first + count) * row_nbytes]


def _check_stored(data: np.ndarray, row: TensorType, shape: Sequence[int], first: int, count: int, name: str) -> None:
    """FileFormatError naming tensor and row if a value of these rows is NaN or infinite; they are seldom decoded."""
    ne0 = shape[0]
    piece = data if row.tensor_extra_bytes else _rows_of(data, row, ne0, first, count)
    if surely_finite(piece, row, ne0):
        return
    # Numbers of 64 bits may be finite beyond the range of float32.
    is_f64 = row.name == "f64"
    values = piece.view(np.float64).reshape(count, ne0) if is_f64 else read_rows(data, row, shape, first, count)
    check_finite(values, name, range(first, first + count))


def _check_encoded(coded: np.ndarray, row: TensorType, ne0: int, rows: Sequence[int], name: str) -> None:
    """UnsupportedError naming tensor and row if the encoded rows of these numbers hold a value that is not finite."""
    if surely_finite(coded, row, ne0):
        return
    if bad := bad_row(_core().dequantize(coded, row.id, ne0, len(rows))):
        raise beyond_range(row, rows[bad[0]], name)


def beyond_range(row: TensorType, number: int, name: str) -> UnsupportedError:
    """The error for a row (by its number in the tensor) whose values a type cannot hold."""
    wider = "f32" if row.name in ("bf16", "bf16_r16") else "bf16"
    return UnsupportedError(
        f"quantized data validation failed: row {number} of tensor {name} has values beyond the range of {row.name}; "
        f"choose another type for it, such as {wider}"
    )


def _repack_rows(data: np.ndarray, read: TensorType, write: TensorType, ne0: int, first: int, count: int) -> np.ndarray:
    piece = _rows_of(data, read, ne0, first, count)
    return np.asarray(_core().repack(piece, read.id, write.id, ne0, count))


def _pieces(read: TensorType, write: TensorType, ne0: int, rows: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each piece of a matrix."""
    if read.tensor_extra_bytes:
        yield 0, rows
        return
    group = int(np.lcm(read.interleave, write.interleave))
    step = max(group, PIECE_ELEMENTS // max(1, ne0) // group * group)
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def _read_checked(
    data: np.ndarray, read: TensorType, shape: Sequence[int], first: int, count: int, name: str, n_threads: int
) -> np.ndarray:
    """Rows as float32, checked for NaN and infinite values, by several threads."""
    groups = count // read.interleave
    n_parts = min(n_threads, groups, count * shape[0] // _PART_ELEMENTS)
    if n_parts < 2 or read.tensor_extra_bytes:
        values = read_rows(data, read, shape, first, count)
        check_finite(values, name, range(first, first + count))
        return values
    out = np.empty((count, shape[0]), np.float32)
    bounds = [groups * part // n_parts * read.interleave for part in range(n_parts + 1)]

    def fill(part: int) -> None:
        low, high = bounds[part], bounds[part + 1]
        values = read_rows(data, read, shape, first + low, high - low)
        check_finite(values, name, range(first + low, first + high))
        out[low:high] = values

    with ThreadPoolExecutor(n_parts) as pool:
        list(pool.map(fill, range(n_parts)))
    return out


def read_rows(data: np.ndarray, read: TensorType, shape: Sequence[int], first: int, count: int) -> np.ndarray:
    """Rows as float32 [count, ne0], counted through all matrices; whole groups of an interleaved type."""
    ne0 = shape[0]
    if read.tensor_extra_bytes:  # one scale behind all rows: the tensor is decoded as a whole
        return dequantize(data, read, shape).reshape(-1, ne0)[first : first + count]
    piece = _rows_of(data, read, ne0, first, count)
    if read.name == "f32":
        return piece.view(np.float32).reshape(count, ne0)
    if read.activation_only:
        raise UsageError(f"type {read.name} is no type of stored tensors")
    return _core().dequantize(piece, read.id, ne0, count)


def check_finite(values: np.ndarray, name: str, rows: Sequence[int]) -> None:
    """FileFormatError naming tensor and row if a value is NaN or infinite. ``rows``: their numbers in the tensor."""
    if bad := bad_row(values):
        index, kind = bad
        raise FileFormatError(f"row {rows[index]} of tensor {name} contains {kind} values; the input is damaged")


def bad_row(values: np.ndarray) -> tuple[int, str] | None:
    """Index of the first row with values that are not finite, and their kind ("NaN", "infinite"); None without any."""
    # A NaN or infinity makes the sum NaN or infinite; only then are the rows looked at one by one.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return None
    bad = ~np.isfinite(values).all(axis=1)
    if not bad.any():
        return None
    row = int(np.argmax(bad))
    return row, "NaN" if np.isnan(values[row]).any() else "infinite"


def _symmetric_q4_0(values: np.ndarray) -> np.ndarray:
    """Q4_0 with levels -7..7 only, d = max|x| / 7 (quant-formats.md#blocks-with-one-scale)."""
    blocks = values.reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(7)
    inverse = np.divide(1, d, out=np.zeros_like(d), where=d > 0)
    q = (np.clip(np.rint(blocks * inverse), -7, 7) + 8).astype(np.uint8)
    out = np.empty((len(blocks), 18), np.uint8)
    with np.errstate(over="ignore"):  # the caller looks for infinite scales
        out[:, :2] = d.astype("<f2").view(np.uint8)
    out[:, 2:] = q[:, :16] | q[:, 16:] << 4
    return out.reshape(-1)
