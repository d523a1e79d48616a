"""The numbers of a checkpoint: plain floats, FP8 with scales, MXFP4 blocks."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.errors import FileFormatError, UnsupportedError

MXFP4_BLOCK, MXFP4_BYTES = 32, 17
# Endings of scale tensors by the name of what they scale, and of scales of activations, which are not used.
WEIGHT_SCALES = ("_scale_inv", "_scale")
_KINDS = {"F64": "f32", "F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "f32"}


class Weights:
    """Tensors by checkpoint name in one of the kinds f32, f16, bf16 (bits as u16) and mxfp4 (GGUF blocks)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    def quantization(self) -> str:
        """Method of a quantized checkpoint, "" for others."""
        return str(self._quantization_config.get("quant_method") or "")

    @property
    def _quantization_config(self) -> dict[str, Any]:
        value = self.checkpoint.config.get("quantization_config") or {}
        return value if isinstance(value, dict) else {}

    def is_scale(self, name: str) -> bool:
        """Whether the tensor belongs to another one: FP8 or MXFP4 scales, scales of activations."""
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in self.checkpoint.tensors:
            return True
        if name.endswith((".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")):
            return True
        return any(name.endswith(end) and name.removesuffix(end) in self.checkpoint.tensors for end in WEIGHT_SCALES)

    def kind(self, name: str) -> str:
        """Kind of the array that load gives. UnsupportedError for integer tensors of other quantizations."""
        tensor = self.checkpoint.tensors[name]
        if name.endswith("_blocks") and tensor.dtype == "U8":
            return "mxfp4"
        if tensor.dtype not in _KINDS:
            raise UnsupportedError(
                f"{tensor.path}: tensor '{name}' has type {tensor.dtype} (quantization '{self.quantization}'); f32, "
                "f16, bf16, FP8 e4m3 and MXFP4 can be converted"
            )
        return _KINDS[tensor.dtype]

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor is stored in FP8."""
        return self.checkpoint.tensors[name].dtype == "F8_E4M3"

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the numbers, slowest dimension first."""
        shape = self.checkpoint.tensors[name].shape
        return (*shape[:-2], shape[-2] * MXFP4_BLOCK) if self.kind(name) == "mxfp4" else shape

    def check_scales(self, name: str) -> None:
        """FileFormatError unless the scales that a tensor needs are there, in the shape that belongs to it."""
        if self.kind(name) == "mxfp4":
            self._mxfp4_scales(name)
        elif self.is_fp8(name):
            scale = self._fp8_scale(name)
            shape, scale_shape = self.checkpoint.tensors[name].shape, self.checkpoint.tensors[scale].shape
            check_scale_shape(shape, scale_shape, self._block_size(name, scale), name)

    def load(self, name: str) -> np.ndarray:
        """The tensor as its kind says; plain floats are a view of the file."""
        if self.kind(name) == "mxfp4":
            return self._mxfp4(name)
        raw = self.checkpoint.raw(name)
        if self.is_fp8(name):
            return self._fp8(name, raw)
        return raw.astype(np.float32) if raw.dtype == np.float64 else raw

    def _fp8(self, name: str, raw: np.ndarray) -> np.ndarray:
        """Values times the scale of their tensor, row or block, float32."""
        values = e4m3_values()[raw]
        scale_name = self._fp8_scale(name)
        raw_scale = self.checkpoint.raw(scale_name)
        if self.checkpoint.tensors[scale_name].dtype == "F8_E8M0":
            scale = np.exp2(raw_scale.astype(np.float32) - 127)
        else:
            scale = to_float32(raw_scale, self.kind(scale_name))
        return scale_blocks(values, scale, self._block_size(name, scale_name), name)

    def _fp8_scale(self, name: str) -> str:
        scale_name = next((name + end for end in WEIGHT_SCALES if name + end in self.checkpoint.tensors), None)
        if scale_name is None:
            raise FileFormatError(f"{self.checkpoint.folder}: FP8 tensor '{name}' has no scale ('{name}_scale_inv')")
        return scale_name

    def _block_size(self, name: str, scale_name: str) -> tuple[int, int]:
        """Rows and columns one scale covers: as the configuration says, else whole tensors or rows."""
        rows, columns = (1, *self.checkpoint.tensors[name].shape)[-2:]
        scale_rows, scale_columns = (1, 1, *self.checkpoint.tensors[scale_name].shape)[-2:]
        if scale_columns == 1 and scale_rows in (1, rows):
            return rows // scale_rows, columns
        block = self._quantization_config.get("weight_block_size") or (128, 128)
        return int(block[0]), int(block[1])

    def _mxfp4(self, name: str) -> np.ndarray:
        """Blocks u8 [..., rows, n/32 * 17]: scale byte, then 16 bytes with element j low and j + 16 high."""
        blocks, scales = self.checkpoint.raw(name), self.checkpoint.raw(self._mxfp4_scales(name))
        # The checkpoint has elements 2j low and 2j + 1 high in byte j.
        out = np.empty((*scales.shape, MXFP4_BYTES), np.uint8)
        out[..., 0] = scales
        out[..., 1::2] = blocks[..., :8] & 15 | (blocks[..., 8:] & 15) << 4
        out[..., 2::2] = blocks[..., :8] >> 4 | blocks[..., 8:] & 0xF0
        return out.reshape(*scales.shape[:-1], scales.shape[-1] * MXFP4_BYTES)

    def _mxfp4_scales(self, name: str) -> str:
        scales_name, tensors = f"{name.removesuffix('_blocks')}_scales", self.checkpoint.tensors
        if scales_name not in tensors:
            raise FileFormatError(f"{self.checkpoint.folder}: MXFP4 tensor '{name}' has no '{scales_name}'")
        if tuple(tensors[name].shape) != (*tensors[scales_name].shape, MXFP4_BLOCK // 2):
            raise FileFormatError(f"{self.checkpoint.folder}: shapes of '{name}' and '{scales_name}' do not fit")
        return scales_name


def check_scale_shape(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], block: tuple[int, int], name: str
) -> tuple[int, int]:
    """Rows and columns of blocks of a tensor [..., rows, columns]; FileFormatError unless there is one scale, or one
    for each block."""
    rows, columns = (1, *shape)[-2:]
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if math.prod(scale_shape) != 1 and (*shape[:-2], *grid) != tuple(scale_shape):
        raise FileFormatError(
            f"scales of tensor '{name}' have shape {list(scale_shape)}; {list(shape)} in blocks of "
            f"{block[0]} x {block[1]} needs {[*shape[:-2], *grid]}"
        )
    return grid


def scale_blocks(values: np.ndarray, scale: np.ndarray, block: tuple[int, int], name: str) -> np.ndarray:
    """values f32 [..., rows, columns] times scale [..., blocks of rows, blocks of columns], in place."""
    grid = check_scale_shape(values.shape, scale.shape, block, name)
    columns = values.shape[-1]
    if scale.size == 1:
        values *= scale.reshape(())
        return values
    for i in range(grid[0]):
        band = np.repeat(scale[..., i, :], block[1], axis=-1)[..., None, :columns]
        values[..., i * block[0] : (i + 1) * block[0], :] *= band
    return values


@functools.cache
def e4m3_values() -> np.ndarray:
    """The 256 values of FP8 e4m3 (bias 7, no infinities, 0x7F and 0xFF are NaN), float32."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code >> 7, -magnitude, magnitude).astype(np.float32)


def to_float32(raw: np.ndarray, kind: str) -> np.ndarray:
    """Stored words of kind f32, f16 or bf16 as float32."""
    if kind == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)
