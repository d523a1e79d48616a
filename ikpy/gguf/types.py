"""Constants of the GGUF container: versions, value types, limits."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

MAGIC = b"GGUF"
READ_VERSIONS = (2, 3)
WRITE_VERSION = 3
DEFAULT_ALIGNMENT = 32
# Padding of headers is made in memory; the largest pages of common systems have 2 MiB.
MAX_ALIGNMENT = 1 << 24
MAX_DIMS = 4
# Keys; a damaged length must not make a string of the whole file.
MAX_NAME_BYTES = (1 << 16) - 1
# llama.cpp loads no name of 64 bytes and more. Layers and experts are numbers in names, and Python reads none of more
# than 4,300 digits.
MAX_TENSOR_NAME_BYTES = 1023
# Strings per array; vocabularies and merge lists stay below one million.
MAX_ARRAY_STRINGS = 1 << 24

KEY_ALIGNMENT = "general.alignment"
KEY_SPLIT_NO = "split.no"
KEY_SPLIT_COUNT = "split.count"
KEY_SPLIT_TENSORS = "split.tensors.count"
SPLIT_KEYS = (KEY_SPLIT_NO, KEY_SPLIT_COUNT, KEY_SPLIT_TENSORS)


class GGUFValueType(IntEnum):
    """Type of a metadata value, with the number stored in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12

    @property
    def label(self) -> str:
        """Short name used in messages and on the command line: `u8` ... `f64`, `bool`, `str`, `arr`."""
        return LABELS[self]

    @property
    def holds_integers(self) -> bool:
        return self not in _NOT_INTEGERS


_NOT_INTEGERS = (
    GGUFValueType.FLOAT32,
    GGUFValueType.FLOAT64,
    GGUFValueType.BOOL,
    GGUFValueType.STRING,
    GGUFValueType.ARRAY,
)

LABELS = {
    GGUFValueType.UINT8: "u8",
    GGUFValueType.INT8: "i8",
    GGUFValueType.UINT16: "u16",
    GGUFValueType.INT16: "i16",
    GGUFValueType.UINT32: "u32",
    GGUFValueType.INT32: "i32",
    GGUFValueType.FLOAT32: "f32",
    GGUFValueType.BOOL: "bool",
    GGUFValueType.STRING: "str",
    GGUFValueType.ARRAY: "arr",
    GGUFValueType.UINT64: "u64",
    GGUFValueType.INT64: "i64",
    GGUFValueType.FLOAT64: "f64",
}

# Storage of the fixed-size types; a bool is one byte, 0 or 1.
DTYPES: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


def align_up(offset: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is >= `offset` (both in bytes)."""
    return -(-offset // alignment) * alignment


def type_label(value_type: GGUFValueType, element_type: GGUFValueType | None = None) -> str:
    """Label of a value type; arrays read `arr[f32]`."""
    return value_type.label if element_type is None else f"arr[{element_type.label}]"
