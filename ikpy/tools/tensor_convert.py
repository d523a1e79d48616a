"""Conversion of one tensor's data between types, a piece of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ikpy.errors import FileFormatError, ResourceError, UsageError
from ikpy.quants import registry
from ikpy.quants.codec import dequantize
from ikpy.quants.registry import TensorType
from ikpy.threads import hardware_threads

# Float values held at a time: 16 MiB of floats keep all threads busy and memory small.
PIECE_ELEMENTS = 1 << 22
_PIECE_BYTES = 1 << 24
# Rows are read by several threads if each gets so many values.
_PART_ELEMENTS = 1 << 18


def _core():  # type: ignore[no-untyped-def]
    """The native core; imported late because planning alone does not need it."""
    from ikpy._native import core

    return core


def can_encode(type_name: str) -> bool:
    """Whether floats can be converted to this type."""
    return type_name == "f32" or bool(_core().can_quantize(registry.by_name(type_name).id))


def repack_target(type_name: str) -> str:
    """Interleaved type that repacking gives on this machine, or "" (tools 2.9: F16 and BF16 need AVX512-BF16)."""
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
    straddle matrices. FileFormatError names tensor and row of a NaN or infinite value, ResourceError a tensor for which
    there is too little memory.
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
                yield _repack_rows(data, read, write, ne0, start, count)
                continue
            values = _read_checked(data, read, shape, start, count, name, n_threads)
            if target == "q4_0" and symmetric_q4_0:
                yield _symmetric_q4_0(values)
            elif target == "f32":
                yield np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
            else:
                yield encode(values, write, weights, n_threads, name)


def encode(values: np.ndarray, write: TensorType, weights: np.ndarray | None, n_threads: int, name: str) -> np.ndarray:
    """Rows float32 [n, ne0] as bytes of a type. ResourceError naming the tensor if there is too little memory."""
    try:
        return np.asarray(_core().quantize(values, write.id, weights, n_threads))
    except MemoryError:
        raise ResourceError(
            f"not enough memory to encode tensor {name} as {write.name} with {n_threads} threads"
        ) from None


def _copy(data: np.ndarray, row: TensorType, shape: Sequence[int], name: str, skip: int) -> Iterator[np.ndarray]:
    """The bytes as they are; floats are checked on the way."""
    is_float = row.name in ("f32", "f16", "bf16")
    ne0 = shape[0]
    rows = int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, PIECE_ELEMENTS // max(1, ne0)) * row.row_nbytes(ne0) if is_float and ne0 else _PIECE_BYTES
    for first in range(skip, len(data), step):
        piece = data[first : first + step]
        if is_float:
            start = first // row.row_nbytes(ne0)
            count = min(len(piece) // row.row_nbytes(ne0), rows - start)
            check_finite(read_rows(data, row, shape, start, count), name, start)
        yield piece


def _repack_rows(data: np.ndarray, read: TensorType, write: TensorType, ne0: int, first: int, count: int) -> np.ndarray:
    row_bytes = read.row_nbytes(ne0)
    piece = data[first * row_bytes : (first + count) * row_bytes]
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
        check_finite(values, name, first)
        return values
    out = np.empty((count, shape[0]), np.float32)
    bounds = [groups * part // n_parts * read.interleave for part in range(n_parts + 1)]

    def fill(part: int) -> None:
        low, high = bounds[part], bounds[part + 1]
        values = read_rows(data, read, shape, first + low, high - low)
        check_finite(values, name, first + low)
        out[low:high] = values

    with ThreadPoolExecutor(n_parts) as pool:
        list(pool.map(fill, range(n_parts)))
    return out


def read_rows(data: np.ndarray, read: TensorType, shape: Sequence[int], first: int, count: int) -> np.ndarray:
    """Rows as float32 [count, ne0], counted through all matrices; whole groups of an interleaved type."""
    ne0 = shape[0]
    if read.tensor_extra_bytes:  # one scale behind all rows: the tensor is decoded as a whole
        return dequantize(data, read, shape).reshape(-1, ne0)[first : first + count]
    row_bytes = read.row_nbytes(ne0)
    piece = data[first * row_bytes : (first + count) * row_bytes]
    if read.name == "f32":
        return piece.view(np.float32).reshape(count, ne0)
    if read.activation_only:
        raise UsageError(f"type {read.name} is no type of stored tensors")
    return _core().dequantize(piece, read.id, ne0, count)  # type: ignore[no-any-return]


def check_finite(values: np.ndarray, name: str, first_row: int) -> None:
    """FileFormatError naming tensor and row if a value is NaN or infinite."""
    # A NaN or infinity makes the sum NaN or infinite; only then are the rows looked at one by one.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = ~np.isfinite(values).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        kind = "NaN" if np.isnan(values[row]).any() else "infinite"
        raise FileFormatError(f"row {first_row + row} of tensor {name} contains {kind} values; the input is damaged")


def _symmetric_q4_0(values: np.ndarray) -> np.ndarray:
    """Q4_0 with levels -7..7 only, d = max|x| / 7 (quant-formats 6.1)."""
    blocks = values.reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(7)
    inverse = np.divide(1, d, out=np.zeros_like(d), where=d > 0)
    q = (np.clip(np.rint(blocks * inverse), -7, 7) + 8).astype(np.uint8)
    out = np.empty((len(blocks), 18), np.uint8)
    out[:, :2] = d.astype("<f2").view(np.uint8)
    out[:, 2:] = q[:, :16] | q[:, 16:] << 4
    return out.reshape(-1)
