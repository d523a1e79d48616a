"""Ternary types (quant-formats.md#ternary-types) and the two of mainline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ikpy.quants.codec import block_type, f32, whole_tensor
from ikpy.quants.layout import Fields, bits, number
from ikpy.quants.tables import table

_E = np.arange(64)


def _trits(codes: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """Trit of a base-3 byte that the multiplier moves to the top: (3 * (B * m mod 256)) >> 8."""
    return (3 * ((codes * multipliers) & 255)) >> 8


@block_type("iq1_bn", header={"d": number(0, "f16")}, code=bits(np.arange(13)))
def iq1_bn(f: Fields) -> np.ndarray:
    """Five trits per byte; byte 12 holds the sixteenth trits of the four groups."""
    group, j = _E >> 4, _E & 15
    last = j == 15
    multipliers = table("iq1bn_mult")[np.where(last, group, j % 5)]
    codes = f["code"][..., np.where(last, 12, 3 * group + np.minimum(j // 5, 2))]
    return f["d"] * f32(_trits(codes, multipliers) - 1)


@block_type("iq2_bn", header={"d": number(0, "f32")}, q=bits(_E & 15, 2 * (_E >> 4), 2))
def iq2_bn(f: Fields) -> np.ndarray:
    """Two-bit codes 0, 1, 2."""
    return f["d"] * f32(f["q"] - 1)


@whole_tensor("i2_s")
def i2_s(data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Two-bit codes of the whole tensor, then one f32 scale and padding."""
    codes, scale = data[:-32].reshape(-1, 1, 32), data[-32:-28].view("<f4")[0]
    shifts = np.array([6, 4, 2, 0], np.uint8)[:, None]
    return (scale * f32(((codes >> shifts) & 3).astype(np.int8) - 1)).reshape(-1)


_POWERS = np.array([1, 3, 9, 27, 81])
_CODE = np.concatenate([np.tile(np.arange(32), 5), 32 + np.tile(np.arange(16), 5), 48 + np.tile(np.arange(4), 4)])
_POWER = np.concatenate([np.repeat(_POWERS, 32), np.repeat(_POWERS, 16), np.repeat(_POWERS[:4], 4)])


@block_type("tq1_0", code=bits(np.arange(52)), d=number(52, "f16"))
def tq1_0(f: Fields) -> np.ndarray:
    """Five trits per byte in runs of 32, 16 and 4 bytes."""
    return f["d"] * f32(_trits(f["code"][..., _CODE], _POWER) - 1)


_E256 = np.arange(256)


@block_type("tq2_0", q=bits(32 * (_E256 >> 7) + (_E256 & 31), 2 * ((_E256 >> 5) & 3), 2), d=number(64, "f16"))
def tq2_0(f: Fields) -> np.ndarray:
    """Two-bit codes 0, 1, 2 with one scale per 256."""
    return f["d"] * f32(f["q"] - 1)
