"""Non-linear levels with shifted second tables: IQ2_K … IQ6_K, KS, KSS, KL (quant-formats.md#non-linear-levels)."""

from __future__ import annotations

import numpy as np

from ikpy.quants.codec import block_type, f32, spread
from ikpy.quants.layout import B16, B32, B64, B128, C, E, Field, Fields, bits, nibble, number
from ikpy.quants.tables import table

_S8, _S16 = np.arange(8), np.arange(16)
_F16_ROW = {"d": number(0, "f16")}
_F32_ROW = {"d": number(0, "f32")}


def _two_bit(base: int) -> Field:
    return bits(base + 32 * B128 + C, 2 * (B32 & 3), 2)


def _bit_plane(base: int) -> Field:
    return bits(base + C, B32, 1)


def _nibbles_16_apart(base: int) -> Field:
    return nibble(base + 16 * B32 + (C & 15), B16 & 1)


def _nibbles_32_apart(base: int) -> Field:
    return nibble(base + 32 * B64 + C, B32 & 1)


def levels(name: str, f: Fields, scale: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """y = d * scale * level, the level from the normal (``extra`` 0) or the shifted half of the table."""
    values = table(name)
    shift = spread(extra * (len(values) // 2), 256)
    return spread(f["d"] * f32(scale), 256) * f32(values[f["q"] + shift])


_EXTRA16 = bits(2 + (_S16 >> 3), _S16 & 7, 1)
_SCALE6 = nibble(8 + (_S16 >> 1), _S16 & 1) | bits(4 + (_S16 >> 2), 2 * (_S16 & 3), 2)


@block_type("iq2_k", d=number(0, "f16"), extra=_EXTRA16, scale=nibble(4 + (_S16 >> 1), _S16 & 1), q=_two_bit(12))
def iq2_k(f: Fields) -> np.ndarray:
    """Four levels, signed four-bit scales per 16."""
    return levels("iq2nl_values", f, f["scale"] - 8, f["extra"])


@block_type(
    "iq3_k",
    d=number(0, "f16"),
    extra=_EXTRA16,
    scale_sign=bits(4 + (_S16 >> 3), _S16 & 7, 1),
    scale=nibble(6 + (_S16 >> 1), _S16 & 1),
    q=_two_bit(14) | _bit_plane(78),
)
def iq3_k(f: Fields) -> np.ndarray:
    """Eight levels, odd scales with a sign per 16."""
    return levels("iq3nl_values", f, (2 * f["scale"] + 1) * (1 - 2 * f["scale_sign"]), f["extra"])


@block_type("iq4_k", d=number(0, "f16"), extra=_EXTRA16, scale=_SCALE6, q=_nibbles_16_apart(16))
def iq4_k(f: Fields) -> np.ndarray:
    """16 levels, signed six-bit scales per 16."""
    return levels("iq4k_values", f, f["scale"] - 32, f["extra"])


@block_type("iq5_k", d=number(0, "f16"), extra=_EXTRA16, scale=_SCALE6, q=_nibbles_32_apart(16) | _bit_plane(144))
def iq5_k(f: Fields) -> np.ndarray:
    """32 levels, signed six-bit scales per 16."""
    return levels("iq5nl_values", f, f["scale"] - 32, f["extra"])


@block_type(
    "iq6_k",
    d=number(0, "f16"),
    extra=_EXTRA16,
    scale=number(4 + _S16, "i8"),
    q=_nibbles_32_apart(20) | bits(148 + 32 * B128 + C, 2 * (B32 & 3), 2),
)
def iq6_k(f: Fields) -> np.ndarray:
    """64 levels, signed byte scales per 16."""
    return levels("iq6nl_values", f, f["scale"], f["extra"])


@block_type(
    "iq2_ks",
    header=_F16_ROW,
    extra=bits(0, _S8, 1),
    scale=nibble(2 + (_S8 >> 1), _S8 & 1) | bits(1, _S8, 1),
    q=_two_bit(6),
)
def iq2_ks(f: Fields) -> np.ndarray:
    """Four levels, signed five-bit scales per 32."""
    return levels("iq2nl_values", f, f["scale"] - 16, f["extra"])


# The two halves of "extra" are exchanged and the nibble order differs from iq2_ks.
@block_type(
    "iq3_ks",
    header=_F16_ROW,
    scale=nibble(2 + (_S8 & 3), _S8 >> 2) | bits(0, _S8, 1),
    extra=bits(1, _S8, 1),
    q=_two_bit(6) | _bit_plane(70),
)
def iq3_ks(f: Fields) -> np.ndarray:
    """Eight levels, signed five-bit scales per 32."""
    return levels("iq3nl_values", f, f["scale"] - 16, f["extra"])


# Bit 0 of the scale byte selects the table, so the scale itself is always odd.
@block_type("iq4_ks", header=_F32_ROW, scale=bits(_S8), q=_nibbles_16_apart(8))
def iq4_ks(f: Fields) -> np.ndarray:
    """16 levels, odd scales per 32."""
    return levels("iq4k_values", f, (f["scale"] & 254) - 127, f["scale"] & 1)


@block_type("iq5_ks", header=_F32_ROW, scale=bits(_S8), q=_nibbles_32_apart(8) | _bit_plane(136))
def iq5_ks(f: Fields) -> np.ndarray:
    """32 levels, odd scales per 32."""
    return levels("iq5nl_values", f, (f["scale"] & 254) - 127, f["scale"] & 1)


@block_type("iq4_kss", header=_F32_ROW, word=number(2 * np.arange(64), "u16"))
def iq4_kss(f: Fields) -> np.ndarray:
    """16 levels in words of even parity whose free bits hold the scale byte (quant-formats.md#scales-per-row)."""
    words = f["word"].reshape(*f["word"].shape[:-1], 8, 8)
    scale = ((words & 1) << np.arange(8)).sum(axis=-1)
    even = words & 0xFFFE
    even = even ^ (even >> 1)
    nibbles = np.stack([(even >> 4 * n) & 15 for n in range(4)], axis=-1)  # elements 2n, 2n+16, 2n+1, 2n+17
    low, high = nibbles[..., 0::2], nibbles[..., 1::2]
    q = np.stack([low, high], axis=-3).reshape(*f["word"].shape[:-1], 256)
    return levels("iq4k_values", f | {"q": q}, (scale & 254) - 127, scale & 1)


_PAIR = E[:128]
_PAIR32, _PAIR_J = _PAIR >> 4, _PAIR & 15


@block_type(
    "iq2_kl",
    header=_F16_ROW,
    scale=nibble(2 + (_S8 & 3), _S8 >> 2) | bits(_S8 >> 2, 2 * (_S8 & 3), 2),
    q=nibble(6 + 16 * (_PAIR32 >> 1) + _PAIR_J, _PAIR32 & 1) | bits(70 + _PAIR_J, _PAIR32, 1),
)
def iq2_kl(f: Fields) -> np.ndarray:
    """Pairs of elements from 32 pairs of levels, signed six-bit scales per 32."""
    pairs = f32(table("iq2kl_pairs")[f["q"]]).reshape(*f["q"].shape[:-1], 256)
    return spread(f["d"] * f32(f["scale"] - 32), 256) * pairs
