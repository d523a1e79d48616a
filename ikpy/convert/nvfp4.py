"""Matrices in NVFP4: e2m1 numbers, a scale e4m3 for every 16 columns and one more number for the whole matrix.

ModelOpt stores X.weight u8 [rows, columns/2], X.weight_scale and X.weight_scale_2, compressed-tensors X.weight_packed,
X.weight_scale and X.weight_global_scale, by which values are divided. Element 2j is in the low half of byte j.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ikpy.convert.checkpoint import Checkpoint, StoredTensor
from ikpy.convert.packed import CACHED, one_per_byte
from ikpy.convert.stored_matrix import CodedMatrix, wrong_part
from ikpy.convert.words import FLOAT_KINDS, e4m3_values, to_float32
from ikpy.errors import FileFormatError

SCALE, FACTOR, DIVISOR = "_scale", "_scale_2", "_global_scale"
GROUP = 16
_BLOCK = 64
_NVFP4 = np.dtype([("scales", "V4"), ("nibbles", "u1", (32,))])
_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32) / 2
_VALUES = np.concatenate([_LEVELS, -_LEVELS])


@dataclass(frozen=True)
class Nvfp4Matrix(CodedMatrix):
    """A matrix of a name X.weight; stored: its tensor of nibbles."""

    checkpoint: Checkpoint
    name: str
    stored: StoredTensor

    @property
    def block_type(self) -> str:
        return "nvfp4"

    @property
    def rows(self) -> int:
        return self.stored.shape[0]

    @property
    def columns(self) -> int:
        return 2 * self.stored.shape[1]

    @functools.cached_property
    def no_blocks(self) -> str:
        if self.columns % _BLOCK:
            return f"rows of {self.columns}"
        scales = self.checkpoint.raw(self.name + SCALE)
        return "scales below 0 or that are no numbers" if (scales >= 127).any() else ""

    def factor(self) -> float:
        end = DIVISOR if self._is_divided else FACTOR
        tensor = self.checkpoint.tensors[self.name + end]
        value = to_float32(self.checkpoint.raw(tensor.name), FLOAT_KINDS[tensor.dtype]).reshape(-1)[0]
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            factor = np.float32(1) / value if self._is_divided else value
        if not np.isfinite([value, factor]).all():
            raise FileFormatError(f"{tensor.path}: tensor '{tensor.name}' is {value:g}; the checkpoint is damaged")
        return float(factor)

    def blocks(self) -> np.ndarray:
        """Blocks u8 [rows, columns/64 * 36]: four scales, then of every 16 elements j low and j + 8 high."""
        n = self.rows * self.columns // _BLOCK
        out = np.empty(n, _NVFP4)
        out["scales"] = self.checkpoint.raw(self.name + SCALE).reshape(-1, 4).view("V4")[:, 0]
        halves = self.checkpoint.raw(self.stored.name).reshape(-1).view("<u8")  # of 16 elements
        step = CACHED // 32
        for first in range(0, n, step):
            nibbles = one_per_byte(halves[4 * first : 4 * (first + step)]).view(np.uint8).reshape(-1, 4, 2, 8)
            out["nibbles"][first : first + step] = (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(-1, 32)
        return out.view(np.uint8).reshape(self.rows, -1)

    def values(self) -> np.ndarray:
        codes = self.checkpoint.raw(self.stored.name)
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(self.rows, -1, GROUP)
        # Both products are exact in 64 bits, so that only the last step rounds.
        scales = e4m3_values()[self.checkpoint.raw(self.name + SCALE)].astype(np.float64) * self.factor()
        return (_VALUES[nibbles] * scales[:, :, None]).astype(np.float32).reshape(self.rows, self.columns)

    def release(self) -> None:
        for name in (self.stored.name, *(self.name + end for end in (SCALE, FACTOR, DIVISOR))):
            if name in self.checkpoint.tensors:
                self.checkpoint.release(name)

    def check(self) -> None:
        """FileFormatError unless all tensors are there and have the shapes that belong to each other."""
        if len(self.stored.shape) != 2 or self.columns % GROUP:
            raise FileFormatError(
                f"{self.stored.path}: tensor '{self.stored.name}' {list(self.stored.shape)} is no matrix in NVFP4, "
                f"whose rows are multiples of {GROUP}"
            )
        self._check(SCALE, ("F8_E4M3",), (self.rows, self.columns // GROUP))
        self._check(DIVISOR if self._is_divided else FACTOR, tuple(FLOAT_KINDS), ())

    @property
    def _is_divided(self) -> bool:
        return self.stored.name != self.name

    def _check(self, end: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        tensor = self.checkpoint.tensors.get(self.name + end)
        if tensor is None:
            raise wrong_part(self.stored, self.name + end)
        if tensor.dtype not in dtypes or (tensor.shape != shape and (shape or tensor.shape != (1,))):
            raise FileFormatError(
                f"{tensor.path}: tensor '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}; "
                f"{self.rows} x {self.columns} in NVFP4 need {' or '.join(dtypes)} {list(shape or (1,))}"
            )


def open_nvfp4(checkpoint: Checkpoint, name: str, stored: StoredTensor) -> Nvfp4Matrix | None:
    """The matrix of a name if its bytes are NVFP4: scales are FP8."""
    scale = checkpoint.tensors.get(name + SCALE)
    if stored.dtype != "U8" or scale is None or scale.dtype != "F8_E4M3":
        return None
    matrix = Nvfp4Matrix(checkpoint, name, stored)
    matrix.check()
    return matrix
