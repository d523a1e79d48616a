"""Matrices of bitsandbytes: NF4 and FP4 in blocks of consecutive values, and integers of 8 bits with a scale per row.

Four bits: X.weight u8 [n/2, 1], the first value in the high half of a byte, X.weight.quant_map f32 [16],
X.weight.absmax with the factor of every block and X.weight.quant_state.bitsandbytes__T, JSON of shape and block size.
Factors may be codes themselves (`nested_`). Eight bits: X.weight I8 [rows, columns] and X.SCB f32 [rows].
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint, StoredTensor
from ikpy.convert.stored_matrix import WEIGHT, CodedMatrix, wrong_part
from ikpy.convert.words import FLOAT_KINDS, to_float32
from ikpy.errors import FileFormatError

METHOD = "bitsandbytes"
ROW_SCALES = ".SCB"
ROW_PARTS = (ROW_SCALES, ".weight_format")
_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *(_STATE + kind for kind in _KINDS))
_LARGEST = 127


@dataclass(frozen=True)
class _NamedMatrix(CodedMatrix):
    """A matrix in the tensor of its name, X.weight."""

    checkpoint: Checkpoint
    name: str

    @property
    def stored(self) -> StoredTensor:
        return self.checkpoint.tensors[self.name]


@dataclass(frozen=True)
class RowScaledMatrix(_NamedMatrix):
    """A matrix in integers of 8 bits."""

    no_blocks: ClassVar[str] = "8 bits"

    @property
    def rows(self) -> int:
        return self.stored.shape[0]

    @property
    def columns(self) -> int:
        return self.stored.shape[1]

    def values(self) -> np.ndarray:
        scales = self.checkpoint.raw(self._scales.name).astype(np.float64) / _LARGEST
        return (self.checkpoint.raw(self.name) * scales[:, None]).astype(np.float32)

    def release(self) -> None:
        for name in (self.name, self._scales.name):
            self.checkpoint.release(name)

    def check(self) -> None:
        """FileFormatError unless there is a scale for every row."""
        if self._scales.dtype != "F32" or len(self.stored.shape) != 2 or self._scales.shape != (self.rows,):
            raise FileFormatError(
                f"{self._scales.path}: tensor '{self._scales.name}' is {self._scales.dtype} "
                f"{list(self._scales.shape)}; '{self.name}' {list(self.stored.shape)} needs F32 [rows]"
            )

    @property
    def _scales(self) -> StoredTensor:
        name = self.name.removesuffix(WEIGHT) + ROW_SCALES
        if name not in self.checkpoint.tensors:
            raise wrong_part(self.stored, name)
        return self.checkpoint.tensors[name]


@dataclass(frozen=True)
class _State:
    """What a quant_state says; of factors that are no codes, nested_block is 1 and nested_offset 0."""

    rows: int
    columns: int
    block: int
    nested_block: int = 1
    nested_offset: float = 0.0


def _read_state(text: bytes, *, nested: bool) -> _State:
    """One of Python's own errors for values that are missing or cannot be."""
    values = json.loads(text)
    rows, columns = values["shape"]
    sizes = rows, columns, values["blocksize"], values["nested_blocksize"] if nested else 1
    offset = float(values["nested_offset"]) if nested else 0.0
    if any(type(n) is not int or n < 1 for n in sizes) or not math.isfinite(offset):
        raise ValueError(f"sizes {list(sizes)}, offset {offset:g}")
    return _State(*sizes, offset)


@dataclass(frozen=True)
class MappedMatrix(_NamedMatrix):
    """A matrix in codes of four bits."""

    no_blocks: ClassVar[str] = "levels of bitsandbytes"

    @property
    def rows(self) -> int:
        return self._state.rows

    @property
    def columns(self) -> int:
        return self._state.columns

    def values(self) -> np.ndarray:
        codes = self.checkpoint.raw(self.name).reshape(-1)
        levels = self._floats(".quant_map")[np.stack([codes >> 4, codes & 15], axis=-1)]
        factors = self._factors()
        return (levels.reshape(len(factors), -1) * factors[:, None]).reshape(self.rows, self.columns)

    def release(self) -> None:
        for end in ("", *PARTS):
            if self.name + end in self.checkpoint.tensors:
                self.checkpoint.release(self.name + end)

    def check(self) -> None:
        """FileFormatError unless all parts are there with the numbers that the shape needs."""
        n, block = self.rows * self.columns, self._state.block
        if n % block or self.stored.nbytes * 2 != n:
            raise FileFormatError(
                f"{self.stored.path}: tensor '{self.name}' {list(self.stored.shape)} does not hold "
                f"[{self.rows}, {self.columns}] in blocks of {block}"
            )
        self._check(".quant_map", 16)
        self._check(".absmax", n // block)
        if self._is_nested:
            self._check(".nested_quant_map", 256)
            self._check(".nested_absmax", -(-n // block // self._state.nested_block))

    # parts

    @property
    def _is_nested(self) -> bool:
        return self._tensor(".absmax").dtype == "U8"

    def _factors(self) -> np.ndarray:
        """Float32, one for every block."""
        if not self._is_nested:
            return self._floats(".absmax")
        codes, outer = self.checkpoint.raw(self.name + ".absmax").reshape(-1), self._floats(".nested_absmax")
        groups = np.arange(len(codes)) // self._state.nested_block
        return self._floats(".nested_quant_map")[codes] * outer[groups] + np.float32(self._state.nested_offset)

    def _floats(self, end: str) -> np.ndarray:
        tensor = self._tensor(end)
        return to_float32(self.checkpoint.raw(tensor.name), FLOAT_KINDS[tensor.dtype]).reshape(-1)

    @functools.cached_property
    def _state(self) -> _State:
        kind = next((kind for kind in _KINDS if self.name + _STATE + kind in self.checkpoint.tensors), _KINDS[0])
        tensor = self._tensor(_STATE + kind)
        try:
            return _read_state(self.checkpoint.raw(tensor.name).tobytes(), nested=self._is_nested)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise FileFormatError(
                f"{tensor.path}: tensor '{tensor.name}' does not say shape and block sizes "
                f"({type(error).__name__}: {error})"
            ) from None

    def _tensor(self, end: str) -> StoredTensor:
        if self.name + end not in self.checkpoint.tensors:
            raise wrong_part(self.stored, self.name + end)
        return self.checkpoint.tensors[self.name + end]

    def _check(self, end: str, n: int) -> None:
        tensor = self._tensor(end)
        is_nested = end == ".absmax" and tensor.dtype == "U8"
        n_stored = int(np.prod(tensor.shape, dtype=np.int64))
        if n_stored != n or not (is_nested or tensor.dtype in FLOAT_KINDS):
            raise FileFormatError(
                f"{tensor.path}: tensor '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}; '{self.name}' needs "
                f"{n} numbers"
            )


def open_bitsandbytes(checkpoint: Checkpoint, name: str) -> RowScaledMatrix | MappedMatrix | None:
    """The matrix of a name if it is one; FileFormatError if a part is wrong."""
    dtype = checkpoint.tensors[name].dtype
    matrix = RowScaledMatrix(checkpoint, name) if dtype == "I8" else MappedMatrix(checkpoint, name)
    if dtype not in ("I8", "U8") or not name.endswith(WEIGHT):
        return None
    matrix.check()
    return matrix
