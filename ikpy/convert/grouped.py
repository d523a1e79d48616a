"""Matrices of GPTQ and AWQ: codes, zero points and scales per group of columns, as Q4_0 or Q4_1 blocks or as floats.

A matrix X.weight [rows, columns] is stored as X.qweight, X.qzeros and X.scales; X.g_idx of GPTQ says which group each
column belongs to. A weight is (code - zero point) * scale.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ikpy.convert.checkpoint import Checkpoint, StoredTensor
from ikpy.convert.group_config import GroupScheme
from ikpy.convert.packed import CACHED, Q4_0_BLOCK, Q4_0_LAYOUT, Q4_1_LAYOUT, fits_f16, least_values, paired_halves
from ikpy.convert.stored_matrix import WEIGHT, CodedMatrix, wrong_part
from ikpy.convert.words import FLOAT_KINDS, to_float32
from ikpy.errors import FileFormatError

CODES, ZEROS, SCALES, GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"
PARTS = (ZEROS, SCALES, GROUPS)
_WORD = 32
# Row 8 c + _GEMM_ORDER[i] of a matrix has bits 4 i .. of word c.
_GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Q4_0_BITS = 4
_LOWEST, _HIGHEST = -8, 7  # levels of Q4_0


@dataclass(frozen=True)
class GroupedMatrix(CodedMatrix):
    """A matrix of a scheme; check() says whether the checkpoint has all that it needs.

    rounds: Q4_1 blocks may round the product of zero point and scale to f16.
    """

    checkpoint: Checkpoint
    module: str
    scheme: GroupScheme
    rounds: bool = False

    @property
    def stored(self) -> StoredTensor:
        return self.checkpoint.tensors[self.module + CODES]

    @property
    def rows(self) -> int:
        shape = self.stored.shape
        return shape[1] * self._per_word if self.scheme.order == "gemm" else shape[self.scheme.order == "gptq"]

    @property
    def columns(self) -> int:
        shape = self.stored.shape
        if self.scheme.order == "gptq":
            return shape[0] * _WORD // self.scheme.bits
        return shape[0] if self.scheme.order == "gemm" else shape[1] * self._per_word

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.scheme.group_size or self.columns

    @property
    def n_groups(self) -> int:
        """Groups of a row."""
        return -(-self.columns // self.group_size)

    @property
    def _per_word(self) -> int:
        return _WORD // self.scheme.bits

    @property
    def block_type(self) -> str:
        return self._blocks[0]

    @property
    def is_rounded(self) -> bool:
        return self._blocks[2]

    @property
    def no_blocks(self) -> str:
        return self._blocks[1]

    @functools.cached_property
    def _blocks(self) -> tuple[str, str, bool]:
        """Type of the blocks that hold the matrix, why none do, "" if they do, and whether values are rounded."""
        reason = self._other_groups()
        if reason:
            return "q4_0", reason, False
        name = self.module + SCALES
        is_exact = fits_f16(self.checkpoint.raw(name), FLOAT_KINDS[self.checkpoint.tensors[name].dtype])
        zeros, last = self._zeros(), (1 << self.scheme.bits) - 1
        if -zeros.max() >= _LOWEST and last - zeros.min() <= _HIGHEST:
            return "q4_0", "" if is_exact else "scales that f16 cannot hold", False
        if self.scheme.bits == Q4_0_BITS and is_exact:
            least, holds = least_values(self._scales(), zeros)
            if holds or (self.rounds and bool(np.isfinite(least).all())):
                return "q4_1", "", not holds
        is_middle = self.scheme.bits > 4 and bool((zeros == (last + 1) // 2).all())
        return "q4_0", f"{self.scheme.bits} bits" if is_middle else "zero points", False

    def _other_groups(self) -> str:
        """How columns share scales that no blocks have, "" if blocks may."""
        if (self.group_size % Q4_0_BLOCK and self.n_groups > 1) or self.columns % Q4_0_BLOCK:
            return f"groups of {self.group_size}"
        return "groups in the order of activations" if self._uses_g_idx else ""

    def blocks(self) -> np.ndarray:
        n_blocks = self.columns // Q4_0_BLOCK
        has_least = self.block_type == "q4_1"
        out = np.empty((self.rows, n_blocks), Q4_1_LAYOUT if has_least else Q4_0_LAYOUT)
        groups = np.arange(n_blocks) * Q4_0_BLOCK // self.group_size
        out["scale"] = self._scales()[:, groups]
        if has_least:
            out["least"] = least_values(self._scales(), self._zeros())[0][:, groups]
        if self.scheme.order == "gptq" and self.scheme.bits == Q4_0_BITS:
            self._pair(out)
        else:
            levels = self._codes()
            if not has_least:
                levels = levels - self._zeros()[:, np.arange(self.columns) // self.group_size] - _LOWEST
            halves = levels.astype(np.uint8).reshape(self.rows, n_blocks, 2, 16)
            out["nibbles"] = (halves[:, :, 0] | halves[:, :, 1] << 4).view("V16")[:, :, 0]
        return out.view(np.uint8).reshape(self.rows, -1)

    def _pair(self, out: np.ndarray) -> None:
        """Nibbles of blocks of codes that are levels already: 7 ms for 7168 x 2048."""
        words = self.checkpoint.raw(self.module + CODES)
        step = max(1, CACHED // self.columns)
        for first in range(0, self.rows, step):
            halves = np.ascontiguousarray(words[:, first : first + step].T).view("<u8")
            out["nibbles"][first : first + step] = paired_halves(halves.reshape(-1, 2)).reshape(-1, out.shape[1])

    def values(self) -> np.ndarray:
        groups = self._g_idx() if self._uses_g_idx else np.arange(self.columns) // self.group_size
        values = (self._codes() - self._zeros()[:, groups]).astype(np.float32)
        values *= self._scales()[:, groups]
        return values

    def release(self) -> None:
        for end in (CODES, *PARTS):
            if self._has(end):
                self.checkpoint.release(self.module + end)

    def check(self) -> None:
        """FileFormatError unless all tensors have the shapes of the scheme."""
        codes, bits = self.stored, self.scheme.bits
        if codes.dtype != "I32" or len(codes.shape) != 2 or 0 in codes.shape:
            raise FileFormatError(
                f"{codes.path}: tensor '{codes.name}' is {codes.dtype} {list(codes.shape)}, no matrix of packed words"
            )
        if self.scheme.order == "gptq" and codes.shape[0] * _WORD % (bits * _WORD if bits == 3 else bits):
            raise FileFormatError(
                f"{codes.path}: tensor '{codes.name}' {list(codes.shape)} has no codes of {bits} bits"
            )
        rows, groups = self.rows, self.n_groups
        if bits == 3 and rows % _WORD:
            raise FileFormatError(f"{codes.path}: tensor '{codes.name}' has {rows} rows, no multiple of {_WORD}")
        if self.scheme.order == "gemv":
            self._check(ZEROS, (rows, -(-groups // self._per_word)), ("I32",), may_be_wider=True)
            self._check(SCALES, (rows, groups), tuple(FLOAT_KINDS), may_be_wider=True)
        else:
            self._check(ZEROS, (groups, -(-rows * bits // _WORD)), ("I32",))
            self._check(SCALES, (groups, rows), tuple(FLOAT_KINDS))
        if self._has(GROUPS):
            self._check(GROUPS, (self.columns,), ("I32", "I64"))
            index = self._g_idx()
            if index.min() < 0 or index.max() >= groups:
                raise wrong_part(
                    self.stored,
                    self.module + GROUPS,
                    f"names groups from {index.min()} to {index.max()}; there are {groups}",
                )

    # parts

    def _codes(self) -> np.ndarray:
        """Codes i16 [rows, columns]."""
        words = self.checkpoint.raw(self.module + CODES)
        if self.scheme.order == "gptq":
            return np.ascontiguousarray(_fields(words, self.scheme.bits).T)
        if self.scheme.order == "gemm":
            return np.ascontiguousarray(_in_order(_fields(words.T, self.scheme.bits)))
        return np.ascontiguousarray(_fields(words.T, self.scheme.bits).T)

    def _zeros(self) -> np.ndarray:
        """Zero points i16 [rows, groups]."""
        words = self.checkpoint.raw(self.module + ZEROS)
        if self.scheme.order == "gemv":
            return _fields(words.T, self.scheme.bits).T[:, : self.n_groups]
        if self.scheme.order == "gemm":
            return _in_order(_fields(words.T, self.scheme.bits))
        bits, is_one_less = self.scheme.bits, self.scheme.zero_offset == 1
        if is_one_less and _WORD % bits == 0:
            words = _each_plus_one(words, bits)
        zeros = _fields(words.T, bits)[: self.rows]
        return (zeros + 1) % (1 << bits) if is_one_less and _WORD % bits else zeros

    def _scales(self) -> np.ndarray:
        """Float32 [rows, groups]."""
        name = self.module + SCALES
        values = to_float32(self.checkpoint.raw(name), FLOAT_KINDS[self.checkpoint.tensors[name].dtype])
        return values[:, : self.n_groups] if self.scheme.order == "gemv" else values.T

    def _g_idx(self) -> np.ndarray:
        return self.checkpoint.raw(self.module + GROUPS)

    @functools.cached_property
    def _uses_g_idx(self) -> bool:
        """Whether columns have other groups than those that follow each other."""
        if not self._has(GROUPS) or self.scheme.order != "gptq":
            return False
        return not np.array_equal(self._g_idx(), np.arange(self.columns) // self.group_size)

    def _has(self, end: str) -> bool:
        return self.module + end in self.checkpoint.tensors

    def _check(self, end: str, shape: tuple[int, ...], dtypes: Collection[str], *, may_be_wider: bool = False) -> None:
        if not self._has(end):
            raise wrong_part(self.stored, self.module + end)
        tensor = self.checkpoint.tensors[self.module + end]
        wide = len(tensor.shape) == 2 and tensor.shape[0] == shape[0] and tensor.shape[1] >= shape[-1]
        if tensor.dtype not in dtypes or not (tensor.shape == shape or (may_be_wider and wide)):
            raise FileFormatError(
                f"{tensor.path}: tensor '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}; codes of "
                f"{self.scheme.bits} bits of {self.rows} x {self.columns} in groups of {self.group_size} need "
                f"{' or '.join(dtypes)} {list(shape)}"
            )


def open_grouped(checkpoint: Checkpoint, name: str, scheme: GroupScheme, *, rounds: bool) -> GroupedMatrix:
    """The matrix X.weight; FileFormatError names a tensor that is missing or has another shape."""
    matrix = GroupedMatrix(checkpoint, name.removesuffix(WEIGHT), scheme, rounds)
    matrix.check()
    return matrix


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes i16 [n * 32/bits, m] of words I32 [n, m], the lowest bits first; those of 3 bits go on in the next word."""
    per_run = bits if _WORD % bits else 1
    runs = np.ascontiguousarray(words).view(np.uint32).reshape(-1, per_run, words.shape[1])
    n = per_run * _WORD // bits
    out = np.empty((len(runs), n, words.shape[1]), np.int16)
    for i in range(n):
        word, shift = divmod(i * bits, _WORD)
        field = runs[:, word] >> np.uint32(shift)
        if shift + bits > _WORD:
            field = field | runs[:, word + 1] << np.uint32(_WORD - shift)
        out[:, i] = field & np.uint32((1 << bits) - 1)
    return out.reshape(-1, words.shape[1])


def _in_order(rows: np.ndarray) -> np.ndarray:
    """Rows [8 n, m] of words of AWQ's products of matrices in the order of the matrix."""
    out = np.empty_like(rows).reshape(-1, len(_GEMM_ORDER), rows.shape[1])
    out[:, _GEMM_ORDER] = rows.reshape(out.shape)
    return out.reshape(rows.shape)


def _each_plus_one(words: np.ndarray, bits: int) -> np.ndarray:
    """Words I32 of which each code is one more. Where it was the largest, the next one changes too: that undoes how the
    format's writers take one from each, which is one subtraction of whole words."""
    return words.view(np.uint32) + np.uint32(sum(1 << bit for bit in range(0, _WORD, bits)))
