"""The numbers of a checkpoint: plain floats, FP8 with scales, MXFP4 blocks, and matrices of codes and scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ikpy.convert import bitsandbytes, grouped, modelopt
from ikpy.convert.checkpoint import Checkpoint, StoredTensor
from ikpy.convert.compressed import METHOD, float_blocks, integer_schemes
from ikpy.convert.group_config import AWQ, GPTQ, OWN_FILES, GroupConfig
from ikpy.convert.nvfp4 import DIVISOR, FACTOR, open_nvfp4
from ikpy.convert.packed import CACHED, COMPANIONS, PACKED, open_matrix, paired_halves
from ikpy.convert.stored_matrix import BLOCK_TYPES, WEIGHT, StoredMatrix
from ikpy.convert.words import FLOAT_KINDS, e4m3_values, to_float32
from ikpy.errors import FileFormatError, UnsupportedError

MXFP4_BLOCK, MXFP4_BYTES = 32, 17
_MXFP4 = np.dtype([("scale", "u1"), ("nibbles", "V16")])
# Endings of scale tensors by the name of what they scale.
WEIGHT_SCALES = ("_scale_inv", "_scale")
_SCALE = ".scale"  # DeepSeek V4: X.scale belongs to X.weight
# Of activations and caches, which are not used.
_UNUSED = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    "activation_scale",  # of single matrices, and of stacks of experts (X_activation_scale)
    ".k_scale",
    ".v_scale",
)
# A vector that inputs are multiplied by (AWQ in checkpoints of ModelOpt).
_INPUT_FACTORS = ".pre_quant_scale"
_KINDS = {**FLOAT_KINDS, "F8_E4M3": "f32", "I32": "i32", "I64": "i32"}


class Weights:
    """Tensors by checkpoint name in one of the kinds f32, f16, bf16 (bits as u16), i32, mxfp4, q4_0, q4_1 and nvfp4
    (GGUF blocks).

    A packed matrix goes by the name of what it holds: X.weight, not X.weight_packed or X.qweight. rounds: blocks of
    those with zero points may round what is added to all values of a group.
    """

    def __init__(self, checkpoint: Checkpoint, *, rounds: bool = False) -> None:
        self.checkpoint = checkpoint
        self._rounds = rounds
        config, path = self._quantization_config, checkpoint.folder / "config.json"
        self._schemes = integer_schemes(config, path)
        self._groups = GroupConfig(config, path) if self.quantization in (GPTQ, AWQ) else None
        if self.quantization.startswith(modelopt.METHOD):
            modelopt.check_algorithms(config, path)
        self._matrices: dict[str, StoredMatrix | None] = {}

    @property
    def quantization(self) -> str:
        """Method of a quantized checkpoint, "" for others."""
        return str(self._quantization_config.get("quant_method") or "")

    @functools.cached_property
    def _quantization_config(self) -> dict[str, Any]:
        """Of the checkpoint, or of its language model."""
        config = self.checkpoint.config
        inner = config.get("text_config")
        for values in (config, inner if isinstance(inner, dict) else {}):
            if isinstance(values.get("quantization_config"), dict):
                return values["quantization_config"]
        own = self.checkpoint.json(modelopt.OWN_FILE).get("quantization")
        if isinstance(own, dict):
            return {"quant_method": modelopt.METHOD, **own}
        for file, method in OWN_FILES.items():
            if found := self.checkpoint.json(file):
                return {"quant_method": method, **found}
        return {}

    def names(self) -> Iterator[str]:
        """The tensors of the model in their order. FileFormatError for parts of a packed matrix without the whole."""
        for name in self.checkpoint.tensors:
            if name.endswith(PACKED):
                if name.removesuffix(PACKED) in self.checkpoint.tensors:
                    raise FileFormatError(f"{self.checkpoint.folder}: '{name}' and the same unpacked are both there")
                yield name.removesuffix(PACKED)
            elif self._groups and name.endswith(grouped.CODES):
                yield name.removesuffix(grouped.CODES) + WEIGHT
            elif not self._is_part(name):
                yield name

    def _is_part(self, name: str) -> bool:
        """Whether the tensor belongs to another one: FP8 or MXFP4 scales, scales of activations, parts of integers."""
        tensors = self.checkpoint.tensors
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in tensors:
            return True
        if name.endswith(_UNUSED) or self._is_part_of_method(name):
            return True
        weight = tensors.get(name.removesuffix(_SCALE) + WEIGHT) if name.endswith(_SCALE) else None
        if weight is not None and weight.dtype in ("F8_E4M3", "I8"):
            return True
        ends = (FACTOR, DIVISOR, *WEIGHT_SCALES, *COMPANIONS)
        whole = next((name.removesuffix(end) for end in ends if name.endswith(end)), "")
        if self._schemes and whole.endswith(".weight") and not (whole in tensors or whole + PACKED in tensors):
            raise FileFormatError(f"{tensors[name].path}: tensor '{whole}{PACKED}' of '{name}' is missing")
        return bool(whole) and (whole in tensors or whole + PACKED in tensors)

    def _is_part_of_method(self, name: str) -> bool:
        """Whether the tensor belongs to another one of GPTQ, AWQ or bitsandbytes. UnsupportedError for scales of
        inputs, which would have to go into the weights."""
        tensors = self.checkpoint.tensors
        if name.endswith(_INPUT_FACTORS):
            raise UnsupportedError(f"{tensors[name].path}: tensor '{name}' scales inputs, which cannot be converted")
        if self._groups:
            module = next((name.removesuffix(end) for end in grouped.PARTS if name.endswith(end)), "")
            if module and module + grouped.CODES not in tensors:
                raise FileFormatError(f"{tensors[name].path}: tensor '{module}{grouped.CODES}' of '{name}' is missing")
            return bool(module)
        if self.quantization != bitsandbytes.METHOD:
            return False
        module = next((name.removesuffix(e) for e in bitsandbytes.ROW_PARTS if name.endswith(e)), "")
        whole = next((name.removesuffix(e) for e in bitsandbytes.PARTS if name.endswith(e)), module + WEIGHT)
        return whole in tensors and whole != name

    def stored(self, name: str) -> StoredTensor:
        """The tensor that holds the numbers or codes of a name."""
        tensors = self.checkpoint.tensors
        if name in tensors:
            return tensors[name]
        return tensors.get(name + PACKED) or tensors[name.removesuffix(WEIGHT) + grouped.CODES]

    def is_grouped(self, module: str) -> bool:
        """Whether a module's matrix is one of GPTQ or AWQ, whose writers give modules biases of zeros."""
        return bool(self._groups) and module + grouped.CODES in self.checkpoint.tensors

    def cache_scales(self) -> int:
        """Tensors with scales of caches, which are not used."""
        return sum(name.endswith(modelopt.CACHE_SCALES) for name in self.checkpoint.tensors)

    def release(self, name: str) -> None:
        """Give the pages of a tensor back."""
        matrix = self._matrices.get(name)
        if matrix:
            matrix.release()
        else:
            self.checkpoint.release(self.stored(name).name)

    def kind(self, name: str) -> str:
        """Kind of the array that load gives. UnsupportedError for integer tensors of other quantizations.

        Of packed 4 bits the scales are read: one of BLOCK_TYPES where its blocks hold the same values, else f32.
        """
        tensor = self.stored(name)
        if (name.endswith("_blocks") and tensor.dtype == "U8") or self._fp4_scale(name):
            return "mxfp4"
        matrix = self.matrix(name)
        if matrix:
            return "f32" if matrix.no_blocks else matrix.block_type
        if tensor.dtype not in _KINDS:
            raise self.unknown_type(name)
        return _KINDS[tensor.dtype]

    def unknown_type(self, name: str) -> UnsupportedError:
        """The error about a tensor whose numbers cannot be read."""
        tensor = self.stored(name)
        return UnsupportedError(
            f"{tensor.path}: tensor '{name}' has type {tensor.dtype} (quantization '{self.quantization}'); f32, "
            "f16, bf16, FP8 e4m3, MXFP4, NVFP4, GPTQ, AWQ, bitsandbytes and integers of compressed-tensors can be "
            "converted"
        )

    def _fp4_scale(self, name: str) -> str:
        """The scales 2^e of bytes [rows, n/2] that hold FP4 e2m1, element 2j in the low half of byte j, with one for
        every 32; "" for other tensors. Of DeepSeek V4 (I8), and of MXFP4 of compressed-tensors (U8)."""
        tensor = self.stored(name)
        if not name.endswith(WEIGHT):
            return ""
        if tensor.name != name:
            scale_name, is_fp4 = f"{name}_scale", tensor.dtype == "U8"
        else:
            scale_name = name.removesuffix(WEIGHT) + _SCALE
            is_fp4 = tensor.dtype == "I8" and self.quantization != METHOD
        scale = self.checkpoint.tensors.get(scale_name) if is_fp4 else None
        kinds = ("F8_E8M0",) if tensor.name == name else ("F8_E8M0", "U8")
        return scale_name if scale is not None and scale.dtype in kinds else ""

    def matrix(self, name: str) -> StoredMatrix | None:
        """The matrix if it is stored in codes with scales; FileFormatError if a part is wrong."""
        if name not in self._matrices:
            self._matrices[name] = self._open(name)
        return self._matrices[name]

    def _open(self, name: str) -> StoredMatrix | None:
        tensor = self.stored(name)
        if self._groups and tensor.name.endswith(grouped.CODES):
            module = name.removesuffix(WEIGHT)
            return grouped.open_grouped(self.checkpoint, name, self._groups.scheme(module), rounds=self._rounds)
        if self.quantization == bitsandbytes.METHOD:
            return bitsandbytes.open_bitsandbytes(self.checkpoint, name)
        four_bits = open_nvfp4(self.checkpoint, name, tensor)
        if four_bits or self._fp4_scale(name):
            return four_bits
        if tensor.name == name and (tensor.dtype != "I8" or self.quantization != METHOD):
            return None
        return open_matrix(self.checkpoint, name, self._schemes, rounds=self._rounds)

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor is stored in FP8."""
        return self.stored(name).dtype == "F8_E4M3"

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the numbers, slowest dimension first."""
        matrix = self.matrix(name)
        if matrix:
            return matrix.rows, matrix.columns
        shape = self.stored(name).shape
        if self._fp4_scale(name):
            return (*shape[:-1], shape[-1] * 2)
        return (*shape[:-2], shape[-2] * MXFP4_BLOCK) if self.kind(name) == "mxfp4" else shape

    def check_scales(self, name: str) -> None:
        """FileFormatError unless the scales that a tensor needs are there, in the shape that belongs to it."""
        if self.kind(name) == "mxfp4":
            self._mxfp4_scales(name)
        elif self.is_fp8(name):
            scale = self._fp8_scale(name)
            if self.checkpoint.tensors[scale].dtype not in (*FLOAT_KINDS, "F8_E8M0"):
                raise self.unknown_type(scale)
            shape = self.checkpoint.tensors[name].shape
            check_scale_shape(shape, self._scale_shape(name, scale), self._block_size(name, scale), name)

    def load(self, name: str, kind: str = "") -> np.ndarray:
        """The tensor as its kind says, or as floats if kind is f32; plain floats are a view of the file."""
        kind = kind or self.kind(name)
        matrix = self.matrix(name)
        if matrix:
            # What is no number or infinite is refused where values are encoded.
            with np.errstate(over="ignore", invalid="ignore"):
                return matrix.blocks() if kind in BLOCK_TYPES else matrix.values()
        if self.kind(name) == "mxfp4":
            return self._mxfp4(name) if kind == "mxfp4" else _mxfp4_values(self._mxfp4(name))
        raw = self.checkpoint.raw(name)
        if kind == "i32":
            return self._table(name, raw)
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
        scale = scale.reshape(self._scale_shape(name, scale_name))
        return scale_blocks(values, scale, self._block_size(name, scale_name), name)

    def _fp8_scale(self, name: str) -> str:
        names = [name + end for end in WEIGHT_SCALES]
        if name.endswith(WEIGHT):
            names.append(name.removesuffix(WEIGHT) + _SCALE)
        scale_name = next((scale for scale in names if scale in self.checkpoint.tensors), None)
        if scale_name is None:
            raise FileFormatError(f"{self.checkpoint.folder}: FP8 tensor '{name}' has no scale ('{name}_scale_inv')")
        return scale_name

    def _block_size(self, name: str, scale_name: str) -> tuple[int, int]:
        """Rows and columns one scale covers: as the configuration says, else whole tensors or rows."""
        rows, columns = (1, *self.checkpoint.tensors[name].shape)[-2:]
        scale_rows, scale_columns = (1, 1, *self._scale_shape(name, scale_name))[-2:]
        if scale_columns == 1 and scale_rows in (1, rows):
            return rows // scale_rows, columns
        usual = next(float_blocks(self._quantization_config), (128, 128))
        block = self._quantization_config.get("weight_block_size") or usual
        return int(block[0]), int(block[1])

    def _scale_shape(self, name: str, scale_name: str) -> tuple[int, ...]:
        """Shape of scales; those of rows may come without a second dimension, those of blocks of ModelOpt (FP8_PB_WO)
        with dimensions of 1 between: [blocks of rows, 1, blocks of columns, 1]."""
        shape, scale_shape = self.checkpoint.tensors[name].shape, self.checkpoint.tensors[scale_name].shape
        if len(shape) == 2 and len(scale_shape) == 4 and scale_shape[1::2] == (1, 1):
            return scale_shape[::2]
        return (*scale_shape, 1) if len(shape) == 2 and scale_shape == shape[:1] else scale_shape

    def _mxfp4(self, name: str) -> np.ndarray:
        """Blocks u8 [..., rows, n/32 * 17]: scale byte, then 16 bytes with element j low and j + 16 high."""
        # The checkpoint has elements 2j low and 2j + 1 high in byte j.
        halves = self.checkpoint.raw(self.stored(name).name).view("<u8")
        scales = self.checkpoint.raw(self._mxfp4_scales(name))
        halves = halves.reshape(-1, 2)
        out = np.empty(scales.size, _MXFP4)
        out["scale"] = scales.reshape(-1)
        step = CACHED // MXFP4_BLOCK
        for first in range(0, len(out), step):
            out["nibbles"][first : first + step] = paired_halves(halves[first : first + step])
        return out.view(np.uint8).reshape(*scales.shape[:-1], scales.shape[-1] * MXFP4_BYTES)

    def _mxfp4_scales(self, name: str) -> str:
        is_fp4, tensors = bool(self._fp4_scale(name)), self.checkpoint.tensors
        scales_name = self._fp4_scale(name) or f"{name.removesuffix('_blocks')}_scales"
        if scales_name not in tensors:
            raise FileFormatError(f"{self.checkpoint.folder}: MXFP4 tensor '{name}' has no '{scales_name}'")
        shape, per_row = self.stored(name).shape, MXFP4_BLOCK // 2
        grid = tensors[scales_name].shape
        if shape != ((*grid[:-1], grid[-1] * per_row) if is_fp4 and grid else (*grid, per_row)):
            raise FileFormatError(f"{self.checkpoint.folder}: shapes of '{name}' and '{scales_name}' do not fit")
        return scales_name

    def _table(self, name: str, raw: np.ndarray) -> np.ndarray:
        """Integers as i32; FileFormatError for one that does not fit."""
        table = raw.astype(np.int32)
        if not np.array_equal(table, raw):
            raise FileFormatError(f"{self.checkpoint.folder}: tensor '{name}' holds integers of more than 32 bits")
        return table


def _mxfp4_values(blocks: np.ndarray) -> np.ndarray:
    """Values float32 [..., n] of blocks u8 [..., n/32 * 17]."""
    from ikpy.quants import dequantize, registry

    n = blocks.shape[-1] // MXFP4_BYTES * MXFP4_BLOCK
    shape = (n, blocks.size // blocks.shape[-1])
    return dequantize(blocks.reshape(-1), registry.by_name("mxfp4").id, shape).reshape(*blocks.shape[:-1], n)


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
