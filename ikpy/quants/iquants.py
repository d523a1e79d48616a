"""The mainline i-quants: grids, non-linear four-bit levels (quant-formats.md#grid-types)."""

from __future__ import annotations

import numpy as np

from ikpy.quants.codec import ValueFormula, block_type, f32, spread
from ikpy.quants.layout import B16, B32, C, Fields, bits, bits_at, nibble, number
from ikpy.quants.tables import table

_G8 = np.arange(32)  # group of eight elements
_G4 = np.arange(64)  # group of four elements
_S8, _S16 = np.arange(8), np.arange(16)


def sign_factors(masks: np.ndarray) -> np.ndarray:
    """Sign masks of eight elements [..., n] as factors +1/-1 [..., 8 n]; a set bit is negative."""
    return sign_bit_factors(((masks[..., None] >> np.arange(8)) & 1).reshape(*masks.shape[:-1], -1))


def sign_bit_factors(negative: np.ndarray) -> np.ndarray:
    """Sign bits as factors +1/-1."""
    return f32(1 - 2 * negative)


def grid_values(name: str, index: np.ndarray) -> np.ndarray:
    """Grid points of indices [..., n] as float32 [..., n * points]."""
    return f32(table(name)[index]).reshape(*index.shape[:-1], -1)


def grid_formula(grid: str, multiplier: float, *, sign_bits: bool = False) -> ValueFormula:
    """y = d * (2 s + 1) * multiplier * grid point * sign."""

    def values(f: Fields) -> np.ndarray:
        scale = f["d"] * f32(2 * f["scale"] + 1) * np.float32(multiplier)
        signs = sign_bit_factors(f["sign"]) if sign_bits else sign_factors(f["sign"])
        return spread(scale, 256) * grid_values(grid, f["index"]) * signs

    return values


_KSIGNS = table("ksigns_iq2xs")

# A sign index of seven bits stands for a mask of even parity; masks are the canonical number.
block_type(
    "iq2_xxs",
    d=number(0, "f16"),
    index=bits(2 + 8 * (_G8 >> 2) + (_G8 & 3)),
    sign=bits_at(8 * (6 + 8 * (_G8 >> 2)) + 7 * (_G8 & 3), 7, codes=_KSIGNS),
    scale=bits(9 + 8 * _S8, 4, 4),
)(grid_formula("iq2xxs_grid", 0.125))

block_type(
    "iq2_xs",
    d=number(0, "f16"),
    index=bits(2 + 2 * _G8) | bits(3 + 2 * _G8, 0, 1),
    sign=bits(3 + 2 * _G8, 1, 7, codes=_KSIGNS),
    scale=nibble(66 + (_S16 >> 1), _S16 & 1),
)(grid_formula("iq2xs_grid", 0.125))

block_type(
    "iq2_s",
    d=number(0, "f16"),
    index=bits(2 + _G8) | bits(66 + (_G8 >> 2), 2 * (_G8 & 3), 2),
    sign=bits(34 + _G8),
    scale=nibble(74 + (_S16 >> 1), _S16 & 1),
)(grid_formula("iq2s_grid", 0.125))

block_type(
    "iq3_xxs",
    d=number(0, "f16"),
    index=bits(2 + _G4),
    sign=bits_at(8 * (66 + 4 * (_G8 >> 2)) + 7 * (_G8 & 3), 7, codes=_KSIGNS),
    scale=bits(69 + 4 * _S8, 4, 4),
)(grid_formula("iq3xxs_grid", 0.25))

_E = np.arange(256)
block_type(
    "iq3_s",
    d=number(0, "f16"),
    index=bits(2 + _G4) | bits(66 + (_G4 >> 3), _G4 & 7, 1),
    sign=bits(74 + (_E >> 3), _E & 7, 1),
    scale=nibble(106 + (_S8 >> 1), _S8 & 1),
)(grid_formula("iq3s_grid", 1.0, sign_bits=True))


@block_type(
    "iq1_s",
    d=number(0, "f16"),
    index=bits(2 + _G8) | bits_at(8 * (34 + 2 * (_G8 >> 2)) + 3 * (_G8 & 3), 3),
    scale=bits(35 + 2 * _S8, 4, 3),
    delta=bits(35 + 2 * _S8, 7, 1),
)
def iq1_s(f: Fields) -> np.ndarray:
    """Ternary grid shifted by one eighth, one shift per 32."""
    scale = f["d"] * f32(2 * f["scale"] + 1)
    delta = f32(0.125) * sign_bit_factors(f["delta"])
    return spread(scale, 256) * (grid_values("iq1s_grid", f["index"]) + spread(delta, 256))


# The four top nibbles of the scale words are the f16 block scale.
@block_type(
    "iq1_m",
    index=bits(_G8) | bits(32 + (_G8 >> 1), 4 * (_G8 & 1), 3),
    delta=bits(32 + (_G8 >> 1), 4 * (_G8 & 1) + 3, 1),
    scale=bits_at(8 * (48 + 2 * (_S16 >> 2)) + 3 * (_S16 & 3), 3),
    d=bits(49, 4, 4, "f16") | bits(51, 4, 4) | bits(53, 4, 4) | bits(55, 4, 4),
)
def iq1_m(f: Fields) -> np.ndarray:
    """Ternary grid shifted by one eighth, one shift per 8, scales per 16."""
    scale = f["d"] * f32(2 * f["scale"] + 1)
    delta = f32(0.125) * sign_bit_factors(f["delta"])
    return spread(scale, 256) * (grid_values("iq1s_grid", f["index"]) + spread(delta, 256))


@block_type("iq4_nl", d=number(0, "f16"), q=nibble(2 + (C[:32] & 15), C[:32] >> 4))
def iq4_nl(f: Fields) -> np.ndarray:
    """16 non-linear levels."""
    return f["d"] * f32(table("iq4k_values")[f["q"]])


@block_type(
    "iq4_xs",
    d=number(0, "f16"),
    scale=nibble(4 + (_S8 >> 1), _S8 & 1) | bits(2 + (_S8 >> 2), 2 * (_S8 & 3), 2),
    q=nibble(8 + 16 * B32 + (C & 15), B16 & 1),
)
def iq4_xs(f: Fields) -> np.ndarray:
    """16 non-linear levels with six-bit scales per 32."""
    return spread(f["d"] * f32(f["scale"] - 32), 256) * f32(table("iq4k_values")[f["q"]])
