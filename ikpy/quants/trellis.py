"""Trellis types: values from a generator seeded by the stored index (quant-formats.md#trellis-types)."""

from __future__ import annotations

import numpy as np

from ikpy.quants.codec import block_type, f32, spread
from ikpy.quants.layout import B32, C, Fields, bits, bits_at, nibble, number
from ikpy.quants.tables import table

_MULTIPLIER = np.uint32(0xCBAC1FED)
_OFFSET, _OFFSET_IQ4_ALTERNATIVE = 4096, 36864
_G8, _G4, _S8 = np.arange(32), np.arange(64), np.arange(8)
_ROW = {"d": number(0, "f32")}


def generate(seeds: np.ndarray, count: int) -> np.ndarray:
    """``count`` integers in -126..126 per seed [..., n] as int32 [..., n * count] (quant-formats.md#generator)."""
    state = seeds.astype(np.uint32)
    outputs = []
    for _ in range(count):
        state = state * _MULTIPLIER
        parts = [(state >> np.uint32(8 * byte)) & np.uint32(63) for byte in range(4)]
        outputs.append(np.sum(parts, axis=0, dtype=np.int32) - 126)
    return np.stack(outputs, axis=-1).reshape(*seeds.shape[:-1], -1)


def _scaled(f: Fields, scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    return spread(f["d"] * f32(scale), 256) * f32(values)


@block_type(
    "iq1_kt",
    header=_ROW,
    scale=bits(_S8, 0, 4),
    index=bits(8 + _G8) | nibble(40 + (_G8 & 15), _G8 >> 4) | bits(_G8 >> 2, 4 + (_G8 & 3), 1),
)
def iq1_kt(f: Fields) -> np.ndarray:
    """Groups of 8 from 2^13 vectors."""
    return _scaled(f, table("iq4k_values")[f["scale"]], generate(f["index"] + _OFFSET, 8))


@block_type("iq2_kt", header=_ROW, scale=nibble(_S8 & 3, _S8 >> 2), index=number(4 + 2 * _G8, "u16"))
def iq2_kt(f: Fields) -> np.ndarray:
    """Groups of 8 from 2^16 vectors."""
    return _scaled(f, table("iq4k_values")[f["scale"]], generate(f["index"] + _OFFSET, 8))


@block_type(
    "iq3_kt",
    header=_ROW,
    scale=nibble(_S8 & 3, _S8 >> 2),
    index=number(4 + 2 * _G8, "u16"),
    sign=bits(68 + C, B32, 1),
)
def iq3_kt(f: Fields) -> np.ndarray:
    """Groups of 8 magnitudes from 2^16 vectors, explicit signs."""
    magnitudes = _scaled(f, f["scale"], np.abs(generate(f["index"] + _OFFSET, 8)))
    return magnitudes * f32(1 - 2 * f["sign"])  # zeros keep their sign


@block_type(
    "iq4_kt",
    header=_ROW,
    alternative=bits(4 * _S8, 0, 1),
    scale=bits(4 * _S8, 1, 7),
    index=bits(32 + _G4) | nibble(96 + (_G4 & 31), _G4 >> 5) | bits_at(8 * (4 * (_G4 >> 3) + 1) + 3 * (_G4 & 7), 3),
)
def iq4_kt(f: Fields) -> np.ndarray:
    """Groups of 4 from 2^15 vectors, one of two generator offsets per 32."""
    offset = np.where(f["alternative"] != 0, _OFFSET_IQ4_ALTERNATIVE, _OFFSET)
    return _scaled(f, f["scale"] - 64, generate(f["index"] + spread(offset, 64), 4))
