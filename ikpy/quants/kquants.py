"""The k-quants: 256 elements with quantized scales per 16 or 32 (quant-formats.md#k-quants)."""

from __future__ import annotations

import numpy as np

from ikpy.quants.codec import block_type, f32, spread
from ikpy.quants.layout import B32, B64, B128, C, Field, Fields, bits, nibble, number

_S = np.arange(16)
_LOW2 = 2 * (B32 & 3)


def _scale_and_min(base: int) -> tuple[Field, Field]:
    """The eight six-bit scales and minima packed in twelve bytes; only j < 4 and j >= 4 differ in place."""
    j = np.arange(8)
    first = j < 4
    scale = bits(base + j + np.where(first, 0, 4), 0, 4)
    scale |= bits(base + np.where(first, j, j - 4), np.where(first, 4, 6), 2)
    minimum = bits(base + j + 4, np.where(first, 0, 4), 4)
    minimum |= bits(base + np.where(first, j + 4, j), np.where(first, 4, 6), 2)
    return scale, minimum


def with_min(f: Fields) -> np.ndarray:
    """y = d*scale*q - dmin*min."""
    scale = f["d"] * f32(f["scale"])
    minimum = f["dmin"] * f32(f["min"])
    return spread(scale, 256) * f32(f["q"]) - spread(minimum, 256)


_Q4_SCALE, _Q4_MIN = _scale_and_min(4)

block_type(
    "q2_K",
    scale=bits(_S, 0, 4),
    min=bits(_S, 4, 4),
    q=bits(16 + 32 * B128 + C, _LOW2, 2),
    d=number(80, "f16"),
    dmin=number(82, "f16"),
)(with_min)

block_type(
    "q4_K",
    d=number(0, "f16"),
    dmin=number(2, "f16"),
    scale=_Q4_SCALE,
    min=_Q4_MIN,
    q=nibble(16 + 32 * B64 + C, B32 & 1),
)(with_min)

block_type(
    "q5_K",
    d=number(0, "f16"),
    dmin=number(2, "f16"),
    scale=_Q4_SCALE,
    min=_Q4_MIN,
    q=nibble(48 + 32 * B64 + C, B32 & 1) | bits(16 + C, B32, 1),
)(with_min)


@block_type(
    "q3_K",
    q=bits(32 + 32 * B128 + C, _LOW2, 2) | bits(C, B32, 1),
    scale=nibble(96 + (_S & 7), _S >> 3) | bits(104 + (_S & 3), 2 * (_S >> 2), 2),
    d=number(108, "f16"),
)
def q3_k(f: Fields) -> np.ndarray:
    """Eight levels around 0, signed six-bit scales."""
    return spread(f["d"] * f32(f["scale"] - 32), 256) * f32(f["q"] - 4)


@block_type(
    "q6_K",
    q=nibble(64 * B128 + C + 32 * (B32 & 1), (B32 & 3) >> 1) | bits(128 + 32 * B128 + C, _LOW2, 2),
    scale=number(192 + _S, "i8"),
    d=number(208, "f16"),
)
def q6_k(f: Fields) -> np.ndarray:
    """64 levels around 0, signed byte scales."""
    return spread(f["d"] * f32(f["scale"]), 256) * f32(f["q"] - 32)
