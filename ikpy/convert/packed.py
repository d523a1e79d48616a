"""Integer weights of compressed-tensors: packed four or eight bits, or plain I8, as Q4_0 or Q4_1 blocks or as floats.

A matrix X.weight is stored as X.weight_packed, I32 with the first column in the lowest bits and half the range added to
every value, X.weight_scale, X.weight_shape and perhaps X.weight_zero_point (packed along the rows) and X.weight_g_idx.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ikpy.convert.checkpoint import Checkpoint, StoredTensor
from ikpy.convert.compressed import METHOD, Scheme
from ikpy.convert.stored_matrix import CodedMatrix, wrong_part
from ikpy.convert.words import FLOAT_KINDS, to_float32
from ikpy.errors import FileFormatError, UnsupportedError

PACKED = "_packed"
COMPANIONS = ("_scale", "_shape", "_zero_point", "_g_idx")
Q4_0_BLOCK = 32
Q4_0_LAYOUT = np.dtype([("scale", "<f2"), ("nibbles", "V16")])
Q4_1_LAYOUT = np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "V16")])
_LOWEST = -8
CACHED = 1 << 18
"""Bytes of nibbles that stay in the cache of a core while they are rearranged."""
# Exponents of bf16 numbers whose 8 significant bits f16 has: 2^-17 (the last bit is 2^-24) to below 2^16.
_BF16_LOWEST, _BF16_END = (127 - 17) << 7, (127 + 16) << 7


@dataclass(frozen=True)
class IntegerMatrix(CodedMatrix):
    """A matrix X.weight [rows, columns] of a scheme; check() says whether the checkpoint has all that it needs.

    rounds: Q4_1 blocks may round the product of zero point and scale to f16.
    """

    checkpoint: Checkpoint
    name: str
    rows: int
    columns: int
    scheme: Scheme
    rounds: bool = False

    @property
    def stored(self) -> StoredTensor:
        """The tensor of the integers."""
        tensors = self.checkpoint.tensors
        return tensors[self.name] if self.name in tensors else tensors[self.name + PACKED]

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.scheme.group_size if self.scheme.group_size > 0 else self.columns

    @property
    def block_type(self) -> str:
        return "q4_1" if self._has("_zero_point") else "q4_0"

    @property
    def is_rounded(self) -> bool:
        return self._blocks[1]

    @property
    def no_blocks(self) -> str:
        return self._blocks[0]

    @functools.cached_property
    def _blocks(self) -> tuple[str, bool]:
        """Why blocks cannot hold the matrix, "" if they do, and whether its values are rounded. Reads the scales."""
        if self.scheme.bits != 4 or self.stored.name == self.name:
            return "8 bits", False
        if self._uses_g_idx:
            return "groups in the order of activations", False
        if self.group_size % Q4_0_BLOCK or self.columns % Q4_0_BLOCK:
            return f"groups of {self.group_size}", False
        found = self._fit()
        for end in ("_scale", "_zero_point"):
            if self._has(end):
                self.checkpoint.release(self.name + end)
        return found

    def _fit(self) -> tuple[str, bool]:
        """As _blocks, of groups that blocks have."""
        if not fits_f16(self.checkpoint.raw(self.name + "_scale"), FLOAT_KINDS[self._tensor("_scale").dtype]):
            return "scales that f16 cannot hold", False
        zeros = self._zero_points()
        if zeros is None:
            return "", False
        least, holds = least_values(self._scales(), zeros - _LOWEST)
        if holds or (self.rounds and bool(np.isfinite(least).all())):
            return "", not holds
        return "zero points", False

    def blocks(self) -> np.ndarray:
        """Q4_0 blocks u8 [rows, columns/32 * 18]: f16 scale, then 16 bytes with element j low and j + 16 high; or those
        of Q4_1, which have what the code 0 stands for behind the scale.

        In pieces that stay in the cache of a core: 9 ms for 7168 x 2048 instead of 20.
        """
        n_blocks, zeros = self.columns // Q4_0_BLOCK, self._zero_points()
        layout = Q4_0_LAYOUT if zeros is None else Q4_1_LAYOUT
        out = np.empty((self.rows, n_blocks * layout.itemsize), np.uint8)
        blocks, groups = out.view(layout), np.arange(n_blocks) * Q4_0_BLOCK // self.group_size
        blocks["scale"] = self._scales()[:, groups]
        if zeros is not None:
            blocks["least"] = least_values(self._scales(), zeros - _LOWEST)[0][:, groups]
        halves = self.checkpoint.raw(self.stored.name).view("<u8")  # of blocks
        step = max(1, CACHED // (halves.shape[1] * 8))
        for first in range(0, self.rows, step):
            nibbles = paired_halves(halves[first : first + step].reshape(-1, 2))
            blocks["nibbles"][first : first + step] = nibbles.reshape(-1, n_blocks)
        return out

    def values(self) -> np.ndarray:
        """Float32 [rows, columns]: (integer - zero point) * scale."""
        values = self._integers().astype(np.float32)
        scales, zeros = self._scales(), self._zero_points()
        if self._uses_g_idx:
            groups = self.checkpoint.raw(self.name + "_g_idx")
        elif self.columns % self.group_size:
            groups = np.arange(self.columns) // self.group_size
        else:
            grouped = values.reshape(self.rows, -1, self.group_size)
            if zeros is not None:
                grouped -= zeros[..., None]
            grouped *= scales[..., None]
            return values
        if zeros is not None:
            values -= zeros[:, groups]
        values *= scales[:, groups]
        return values

    def release(self) -> None:
        """Give the pages of all tensors of the matrix back."""
        for name in (self.stored.name, *(self.name + end for end in COMPANIONS)):
            if name in self.checkpoint.tensors:
                self.checkpoint.release(name)

    def check(self) -> None:
        """FileFormatError unless tensors beside the integers have the shapes of the scheme; UnsupportedError for
        groups of activation order that are not all of one size."""
        self._check("_scale", self.scheme.scale_shape(self.rows, self.columns), ("BF16", "F16", "F32"))
        if self._has("_zero_point"):
            self._zero_point_shape()
        elif not self.scheme.symmetric:
            raise wrong_part(self.stored, self.name + "_zero_point")
        if self.scheme.has_g_idx and not self._has("_g_idx"):
            raise wrong_part(self.stored, self.name + "_g_idx")
        if self._has("_g_idx"):
            self._check("_g_idx", (self.columns,), ("I32", "I64"))
            if self._uses_g_idx:
                self._check_groups()

    # parts

    def _integers(self) -> np.ndarray:
        """Signed integers i8 [rows, columns]."""
        raw = self.checkpoint.raw(self.stored.name)
        return raw if raw.dtype == np.int8 else _unpack(raw, self.scheme.bits)[:, : self.columns]

    def _scales(self) -> np.ndarray:
        """Float32 [rows or 1, groups]."""
        name = self.name + "_scale"
        values = to_float32(self.checkpoint.raw(name), FLOAT_KINDS[self.checkpoint.tensors[name].dtype])
        return values.reshape(self.scheme.scale_shape(self.rows, self.columns))

    def _zero_points(self) -> np.ndarray | None:
        """Float32 [rows or 1, groups], None if there are none."""
        if not self._has("_zero_point"):
            return None
        raw = self.checkpoint.raw(self.name + "_zero_point")
        shape = self.scheme.scale_shape(self.rows, self.columns)
        if raw.dtype == np.int8:
            return raw.reshape(shape).astype(np.float32)
        words = np.ascontiguousarray(raw.reshape(-1, shape[1]).T)
        return _unpack(words, self.scheme.bits)[:, : shape[0]].T.astype(np.float32)

    @functools.cached_property
    def _uses_g_idx(self) -> bool:
        """Whether columns have groups of their own; -1 stands for a table that was never filled."""
        return self._has("_g_idx") and not (self.checkpoint.raw(self.name + "_g_idx") == -1).any()

    def _check_groups(self) -> None:
        groups = self.checkpoint.raw(self.name + "_g_idx")
        n_groups = self.scheme.scale_shape(self.rows, self.columns)[1]
        is_known = groups.min() >= 0 and groups.max() < n_groups
        if not is_known or (np.bincount(groups, minlength=n_groups) != self.group_size).any():
            path = self._tensor("_g_idx").path
            raise UnsupportedError(
                f"{path}: tensor '{self.name}_g_idx' does not give each of {n_groups} groups {self.group_size} columns"
            )

    def _has(self, end: str) -> bool:
        return self.name + end in self.checkpoint.tensors

    def _tensor(self, end: str) -> StoredTensor:
        return self.checkpoint.tensors[self.name + end]

    def _check(self, end: str, shape: tuple[int, ...], dtypes: Collection[str]) -> None:
        """FileFormatError unless a companion is there, in a type and with the numbers that belong to it."""
        if not self._has(end):
            raise wrong_part(self.stored, self.name + end)
        tensor = self._tensor(end)
        # One number per row may come without a second dimension, one number without any.
        short = shape[:1] if shape[-1] == 1 else shape
        fits = tensor.shape in (shape, short) or (math.prod(shape) == 1 == math.prod(tensor.shape))
        if not fits or tensor.dtype not in dtypes:
            raise FileFormatError(
                f"{tensor.path}: tensor '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}; the integers of "
                f"{self.rows} x {self.columns} in '{self.stored.name}' need {' or '.join(dtypes)} {list(shape)}"
            )

    def _zero_point_shape(self) -> None:
        rows, groups = self.scheme.scale_shape(self.rows, self.columns)
        if self._tensor("_zero_point").dtype == "I8":
            self._check("_zero_point", (rows, groups), ("I8",))
        else:
            self._check("_zero_point", (-(-rows * self.scheme.bits // 32), groups), ("I32",))


def open_matrix(
    checkpoint: Checkpoint, name: str, schemes: tuple[Scheme, ...], *, rounds: bool = False
) -> IntegerMatrix:
    """The matrix of a name, in the first of the schemes that fits what is stored.

    FileFormatError names a tensor that is missing or has another shape, UnsupportedError one of another format.
    """
    is_packed = name not in checkpoint.tensors
    stored = checkpoint.tensors[name + PACKED if is_packed else name]
    if not schemes or stored.dtype != ("I32" if is_packed else "I8"):
        raise UnsupportedError(
            f"{stored.path}: tensor '{stored.name}' has type {stored.dtype}, which quantization_config of config.json "
            f"does not explain; of {METHOD}, integers of 4 and 8 bits and FP8 are converted"
        )
    shape = _shape(checkpoint, name, stored) if is_packed else stored.shape
    if len(shape) != 2 or len(stored.shape) != 2 or min(shape) < 1:
        raise FileFormatError(f"{stored.path}: tensor '{stored.name}' {list(stored.shape)} is no matrix of integers")
    rows, columns = shape
    candidates = [IntegerMatrix(checkpoint, name, rows, columns, scheme, rounds) for scheme in schemes]
    if is_packed:
        candidates = [m for m in candidates if stored.shape == (rows, -(-columns * m.scheme.bits // 32))]
    if not candidates:
        raise FileFormatError(
            f"{stored.path}: tensor '{stored.name}' {list(stored.shape)} does not hold the {rows} x {columns} integers "
            f"that '{name}_shape' and quantization_config promise"
        )
    for matrix in candidates[:-1]:
        try:
            matrix.check()
        except (FileFormatError, UnsupportedError):
            continue
        return matrix
    candidates[-1].check()
    return candidates[-1]


def _shape(checkpoint: Checkpoint, name: str, stored: StoredTensor) -> tuple[int, ...]:
    """Rows and columns, as a tensor of their own says."""
    tensor = checkpoint.tensors.get(name + "_shape")
    if tensor is None:
        raise wrong_part(stored, name + "_shape")
    if tensor.dtype not in ("I32", "I64") or tensor.shape != (2,):
        raise FileFormatError(
            f"{tensor.path}: tensor '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}; rows and columns are needed"
        )
    return tuple(int(n) for n in checkpoint.raw(tensor.name))


def paired_halves(halves: np.ndarray) -> np.ndarray:
    """Blocks of 32 nibbles in order, u64 [n, 2], as void [n] of 16 bytes: element j low, j + 16 high."""
    nibbles = one_per_byte(halves[:, 1])
    nibbles <<= np.uint16(4)
    nibbles |= one_per_byte(halves[:, 0])
    return nibbles.view("V16")


def one_per_byte(words: np.ndarray) -> np.ndarray:
    """The nibbles of u64 [n] as low halves of bytes, in order, two in each u16 [n * 8]."""
    out = np.ascontiguousarray(words).view(np.uint8).astype("<u2")
    out |= out << np.uint16(4)
    out &= np.uint16(0x0F0F)
    return out


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Signed integers i8 [..., n * 32/bits] of words I32 [..., n]."""
    data = words.view(np.uint8)
    if bits == 8:
        return (data ^ 0x80).view(np.int8)
    out = np.empty((*data.shape, 2), np.int8)
    out[..., 0] = data & 15
    out[..., 1] = data >> 4
    out -= 8
    return out.reshape(*data.shape[:-1], -1)


def fits_f16(raw: np.ndarray, kind: str) -> bool:
    """Whether scales of a kind are finite f16 numbers."""
    if kind == "bf16":
        magnitude = raw & 0x7FFF
        if magnitude.min() >= _BF16_LOWEST and magnitude.max() < _BF16_END:
            return True
    values = to_float32(raw, kind)
    with np.errstate(over="ignore", invalid="ignore"):
        halves = values.astype(np.float16)
    return bool(np.isfinite(halves).all() and (halves == values).all())


def least_values(scales: np.ndarray, zeros: np.ndarray) -> tuple[np.ndarray, bool]:
    """What the code 0 of every group stands for, f16, and whether that is exact; scales f32, zero points of codes."""
    exact = scales * -zeros.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        least = exact.astype("<f2")
    return least, bool((least == exact).all())
