"""Stored words of floats."""

from __future__ import annotations

import functools

import numpy as np

FLOAT_KINDS = {"F64": "f32", "F32": "f32", "F16": "f16", "BF16": "bf16"}
"""safetensors type -> kind of the numbers."""


def to_float32(raw: np.ndarray, kind: str) -> np.ndarray:
    """Stored words of kind f32, f16 or bf16 as float32."""
    if kind == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)


@functools.cache
def e4m3_values() -> np.ndarray:
    """The 256 values of FP8 e4m3 (bias 7, no infinities, 0x7F and 0xFF are NaN), float32."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code >> 7, -magnitude, magnitude).astype(np.float32)
