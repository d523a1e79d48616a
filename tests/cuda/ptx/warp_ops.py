"""The instructions of warp_ops.hpp by ctypes, and the fragment tables of the PTX ISA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tests.cuda.ptx import build

LANES = 32


@cache
def library() -> ctypes.CDLL:
    """The machine's library, with the types of the functions that are used here."""
    loaded = build.library()
    loaded.ptx_fault.restype = ctypes.c_char_p
    loaded.ptx_block.restype = ctypes.c_void_p
    loaded.ptx_block_memory.restype = ctypes.c_void_p
    return loaded


class FaultError(Exception):
    """The text of a Fault."""


def check(status: int) -> None:
    """Raises the Fault of a call that failed."""
    if status:
        raise FaultError(library().ptx_fault().decode())


class Block:
    """One block of threads: shared memory and its asynchronous work."""

    def __init__(self, nbytes: int, late: bool = True) -> None:
        self.lib = library()
        self.handle = ctypes.c_void_p(self.lib.ptx_block(nbytes, int(late)))
        address = self.lib.ptx_block_memory(self.handle)
        self.memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def __del__(self) -> None:
        self.lib.ptx_block_free(self.handle)

    def call(self, name: str, *args: Any) -> None:
        """Calls ptx_NAME of this block; FaultError when it fails."""
        check(getattr(self.lib, "ptx_" + name)(self.handle, *args))

    def test(self, barrier: int, parity: int) -> bool:
        """mbarrier.test_wait.parity."""
        completed = ctypes.c_int()
        self.call("barrier_test", barrier, parity, ctypes.byref(completed))
        return bool(completed.value)


def pointer(array: np.ndarray, offset: int = 0) -> ctypes.c_void_p:
    """Address of an array's memory."""
    return ctypes.c_void_p(array.ctypes.data + offset)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of float32 values that bfloat16 holds exactly."""
    bits = values.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


ENCODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f16": lambda v: v.astype(np.float16).view(np.uint16),
    "bf16": to_bf16,
    "tf32": lambda v: v.astype(np.float32).view(np.uint32),
    "f32": lambda v: v.astype(np.float32).view(np.uint32),
    "s8": lambda v: v.astype(np.int8).view(np.uint8),
    "u8": lambda v: v.astype(np.uint8),
    "s32": lambda v: v.astype(np.int32).view(np.uint32),
}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s8": 8, "u8": 8, "s32": 32}


# The fragment tables: (row, column) of element i of a thread with groupID g = lane / 4 and t = lane % 4.
def a_place(m: int, k: int, bits: int, g: int, t: int, i: int) -> tuple[int, int]:
    """Element i of A (row, k)."""
    match (m, k, bits):
        case (8, 16, 8):
            return g, t * 4 + i
        case (16, 16, 8):
            return (g if i < 4 else g + 8), t * 4 + (i & 3)
        case (16, 32, 8):
            return (g if i < 4 or 8 <= i < 12 else g + 8), t * 4 + (i & 3) + (0 if i < 8 else 16)
        case (16, 8, 16):
            return (g if i < 2 else g + 8), t * 2 + (i & 1)
        case (16, 16, 16):
            return (g if i < 2 or 4 <= i < 6 else g + 8), t * 2 + (i & 1) + (0 if i < 4 else 8)
        case (16, 4, 32):
            return (g, g + 8)[i], t
        case (16, 8, 32):
            return (g, g + 8, g, g + 8)[i], (t, t, t + 4, t + 4)[i]
    raise AssertionError((m, k, bits))


def b_place(k: int, bits: int, g: int, t: int, i: int) -> tuple[int, int]:
    """Element i of B (k, column)."""
    match (k, bits):
        case (16, 8):
            return t * 4 + i, g
        case (32, 8):
            return t * 4 + (i & 3) + (0 if i < 4 else 16), g
        case (8, 16):
            return t * 2 + i, g
        case (16, 16):
            return t * 2 + (i & 1) + (0 if i < 2 else 8), g
        case (4, 32):
            return t, g
        case (8, 32):
            return (t, t + 4)[i], g
    raise AssertionError((k, bits))


def c_place(g: int, t: int, i: int) -> tuple[int, int]:
    """Element i of C or D."""
    return (g if i < 2 else g + 8), t * 2 + (i & 1)


def fragments(matrix: np.ndarray, kind: str, place: Callable[[int, int, int], tuple[int, int]]) -> np.ndarray:
    """Registers (count, 32 lanes) of a matrix."""
    bits = BITS[kind]
    encoded = ENCODE[kind](matrix)
    elements = np.empty((LANES, matrix.size // LANES), encoded.dtype)
    for lane in range(LANES):
        for i in range(elements.shape[1]):
            elements[lane, i] = encoded[place(lane // 4, lane % 4, i)]
    return np.ascontiguousarray(elements.view(np.uint32).T) if bits < 32 else np.ascontiguousarray(elements.T)
