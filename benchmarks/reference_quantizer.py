"""Encoders of the reference's own library (libggml of ik-llama-cpp-python, an AVX2 build), called by ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np

from ikpy.quants import registry


def package_folder() -> Path:
    """Where ik-llama-cpp-python is installed; FileNotFoundError if it is not."""
    found = importlib.util.find_spec("ik_llama_cpp")
    if found is None or not found.origin:
        raise FileNotFoundError("the package ik-llama-cpp-python is not installed")
    return Path(found.origin).parent


def quantize_program() -> Path:
    """Its llama-quantize."""
    return package_folder() / "bin" / "llama-quantize"


@cache
def library() -> ctypes.CDLL:
    """libggml, ready to encode: the look-up tables of F16 are filled when a context is made."""
    lib = ctypes.CDLL(str(package_folder() / "lib" / "libggml.so"))

    class InitParams(ctypes.Structure):
        _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

    lib.ggml_init.restype = ctypes.c_void_p
    lib.ggml_init.argtypes = [InitParams]
    lib.ggml_init(InitParams(1 << 16, None, True))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    return lib


def quantize(values: np.ndarray, type_name: str, imatrix: np.ndarray | None = None) -> np.ndarray:
    """Bytes (uint8) of float32 rows [n, ne0] in a type; imatrix float32 [ne0] or None. One thread."""
    row = registry.by_name(type_name)
    values = np.ascontiguousarray(values, np.float32)
    weights = None if imatrix is None else np.ascontiguousarray(imatrix, np.float32)
    out = np.empty(row.row_nbytes(values.shape[1]) * len(values), np.uint8)
    written = library().ggml_quantize_chunk(
        row.id,
        values.ctypes.data,
        out.ctypes.data,
        0,
        values.shape[0],
        values.shape[1],
        None if weights is None else weights.ctypes.data,
    )
    if written != out.size:
        raise RuntimeError(f"{type_name}: the reference wrote {written} of {out.size} bytes")
    return out
