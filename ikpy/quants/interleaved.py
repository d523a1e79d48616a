"""Row-interleaved types: where the bits of the plain fields go (quant-formats.md#interleaved-rows).

k is the row inside a group, the first index of every field; the values follow from the plain type's formula.
"""

from __future__ import annotations

import numpy as np

from ikpy.quants import bitnet, iqk, kquants, legacy, registry  # noqa: F401 - codecs of the partners
from ikpy.quants.codec import block_type, codec_of, f32, register, spread
from ikpy.quants.iquants import grid_values, sign_bit_factors
from ikpy.quants.layout import B32, C, Field, Fields, bits, bits_at, nibble, number

K4, K8, K16 = (np.arange(rows)[:, None] for rows in (4, 8, 16))
_I = C & 3  # place in a run of four columns
_RUN = C >> 2  # number of the run, 0..7
_S8, _S16 = np.arange(8), np.arange(16)
_IB, _HALF = _S16 >> 1, _S16 & 1  # sub-block and half of a scale per 16 columns
_G8, _G4 = np.arange(32), np.arange(64)


def _like_plain(name: str, header: dict[str, Field] | None = None, **fields: Field) -> None:
    """Register an interleaved type whose fields are those of its plain partner at other places."""
    partner = registry.by_name(name).plain_partner
    register(name, fields, header or {}, codec_of(partner).values)


def _half_scales(rows: np.ndarray, base: int = 0) -> Field:
    return number(base + 2 * rows, "f16")


def _row_scales(rows: np.ndarray) -> dict[str, Field]:
    return {"d": number(4 * rows, "f32")}


def _n4(base: int) -> Field:
    """Nibbles of four rows, 64 bytes per 32 columns."""
    block = (_RUN >> 2) + 2 * (_RUN & 1)
    return nibble(base + 64 * B32 + 16 * block + 4 * K4 + _I, (_RUN >> 1) & 1)


def _p4(base: int, order: tuple[int, ...] = (0, 4, 8, 12)) -> Field:
    """Two-bit fields of four rows, 32 bytes per 32 columns; ``order`` = column offset of each bit pair."""
    pair = np.argsort(np.array(order) >> 2)[_RUN & 3]
    return bits(base + 32 * B32 + 16 * (C >> 4) + 4 * K4 + _I, 2 * pair, 2)


def _b4(base: int, order: tuple[int, ...]) -> Field:
    """One bit of four rows, 16 bytes per 32 columns; ``order`` = column offset of each bit."""
    bit = np.argsort(np.array(order) >> 2)[_RUN]
    return bits(base + 16 * B32 + 4 * K4 + _I, bit, 1)


def _first(field: Field, columns: int) -> Field:
    """The field of a block of fewer columns."""
    parts = tuple(type(part)(part.byte[:, :columns], part.shift[:, :columns], part.width) for part in field.segments)
    return Field(parts, field.kind, field.codes)


def _s8(base_high: int, base_low: int, position: np.ndarray) -> Field:
    """Six-bit scales: low nibbles in 32 bytes, then high bit pairs in 16 bytes, at linear position p."""
    low = nibble(base_low + position % 32, position // 32)
    return low | bits(base_high + position % 16, 2 * (position // 16), 2)


_PER16 = 8 * _IB + 4 * _HALF + K4  # linear position of a scale per 16 columns
_PER32 = 4 * _S8 + K4
_EXTRA = bits(8 + 4 * _HALF + K4, _IB, 1)
_RISING = (0, 4, 8, 12, 16, 20, 24, 28)
_IQ5_ORDER = (0, 8, 16, 24, 4, 12, 20, 28)


def _q8x(base: int, rows: np.ndarray, columns: int, codes: np.ndarray | None = None) -> Field:
    """Bytes of R rows in runs of four columns."""
    e = np.arange(columns)
    return bits(base + 4 * len(rows) * (e >> 2) + 4 * rows + (e & 3), kind="i8", codes=codes)


_32 = np.arange(32)
_BYTE, _HIGH = _32 & 15, _32 >> 4
_BY_FOUR = 32 * (_BYTE >> 2) + 4 * K8 + (_BYTE & 3)  # place of plain byte j of row k in the 8-row nibble types

_like_plain("iq4_nl_r4", d=_half_scales(K4), q=_first(_n4(8), 32))
_like_plain("q5_0_r4", d=_half_scales(K4), q=_first(_n4(24) | _b4(8, (0, 16, 4, 20, 8, 24, 12, 28)), 32))
_like_plain("q6_0_r4", d=_half_scales(K4), q=_first(_n4(40) | _p4(8), 32))
_like_plain("q4_0_r8", d=_half_scales(K8), q=nibble(16 + _BY_FOUR, _HIGH))
_like_plain("mxfp4_r8", d=bits(K8, kind="e8m0"), q=nibble(8 + _BY_FOUR, _HIGH))
_like_plain("q8_0_r8", d=_half_scales(K8), q=_q8x(16, K8, 32))
_like_plain("q8_KV_r8", header=_row_scales(K8), q=_q8x(0, K8, 32))


def _q4_0_arm(name: str, rows: np.ndarray, run: int) -> None:
    """Legacy Arm layouts: runs of bytes of one row after the other, nibbles with the top bit inverted."""
    place = len(rows) * run * (_BYTE // run) + rows * run + _BYTE % run
    q = bits(2 * len(rows) + place, 4 * _HIGH, 4, codes=np.arange(16) ^ 8)
    _like_plain(name, d=_half_scales(rows), q=q)


_q4_0_arm("q4_0_4x4", K4, 4)
_q4_0_arm("q4_0_4x8", K4, 8)
_q4_0_arm("q4_0_8x8", K8, 8)

_like_plain(
    "q2_k_r4",
    d=_half_scales(K4),
    dmin=_half_scales(K4, 8),
    scale=bits(16 + _PER16, 0, 4),
    min=bits(16 + _PER16, 4, 4),
    q=_p4(80),
)
_like_plain("q3_k_r4", d=_half_scales(K4), scale=_s8(8, 24, _PER16), q=_p4(184) | _b4(56, _RISING))

_K_SCALES = {
    "d": _half_scales(K4),
    "dmin": _half_scales(K4, 8),
    "scale": bits(32 + _PER32, 0, 4) | bits(16 + _PER32 % 16, 4 * (_PER32 // 16), 2),
    "min": bits(32 + _PER32, 4, 4) | bits(16 + _PER32 % 16, 4 * (_PER32 // 16) + 2, 2),
}
_like_plain("q4_k_r4", None, **_K_SCALES, q=_n4(64))
_like_plain("q5_k_r4", None, **_K_SCALES, q=_n4(192) | _b4(64, (0, 8, 4, 12, 16, 24, 20, 28)))
_like_plain("q6_k_r4", d=_half_scales(K4), scale=bits(8 + _PER16, kind="i8"), q=_n4(328) | _p4(72, (0, 8, 4, 12)))

_CODE4 = nibble(16 + _PER16 % 32, _PER16 // 32)
_like_plain("iq2_k_r4", d=_half_scales(K4), extra=_EXTRA, scale=_CODE4, q=_p4(48))
_like_plain(
    "iq3_k_r4",
    d=_half_scales(K4),
    extra=_EXTRA,
    scale_sign=bits(16 + 4 * _HALF + K4, _IB, 1),
    scale=nibble(24 + _PER16 % 32, _PER16 // 32),
    q=_p4(56) | _b4(312, _RISING),
)
_like_plain("iq4_k_r4", d=_half_scales(K4), extra=_EXTRA, scale=_s8(16, 32, _PER16), q=_n4(64))
_like_plain(
    "iq5_k_r4",
    d=_half_scales(K4),
    extra=_EXTRA,
    scale=_s8(16, 32, _PER16),
    q=_n4(64) | _b4(576, _IQ5_ORDER),
)
_like_plain("iq4_ks_r4", header=_row_scales(K4), scale=bits(_PER32), q=_n4(32))
_like_plain("iq5_ks_r4", header=_row_scales(K4), scale=bits(_PER32), q=_n4(32) | _b4(544, _IQ5_ORDER))
_like_plain(
    "iq4_xs_r8",
    d=_half_scales(K8),
    scale=_s8(16, 32, 8 * _S8 + K8),
    q=nibble(64 + 128 * B32 + 32 * (C >> 3) + 4 * K8 + _I, _RUN & 1),
)
_like_plain("iq2_bn_r4", header=_row_scales(K4), q=_first(_p4(0), 64))

_GROUP = 16 * (_G8 >> 2) + 4 * K4 + (_G8 & 3)  # place of an 8-group: sub-block, row, group
_Z = np.arange(128)
_SIGN_CODES = (_Z ^ (_Z << 1)) & 255  # stored code -> mask of even parity
_SCALE_IN_SIGN_BYTES = bits(8 + 16 * _S8 + 4 * K4, 0, 1)
for _t in range(1, 4):
    _SCALE_IN_SIGN_BYTES |= bits(8 + 16 * _S8 + 4 * K4 + _t, 0, 1)
_SIGN_IN_SIGN_BYTES = bits(8 + _GROUP, 1, 7, codes=_SIGN_CODES)

_like_plain(
    "iq2_xxs_r4",
    d=_half_scales(K4),
    index=bits(136 + _GROUP),
    sign=_SIGN_IN_SIGN_BYTES,
    scale=_SCALE_IN_SIGN_BYTES,
)
_like_plain(
    "iq3_xxs_r4",
    d=_half_scales(K4),
    index=bits(136 + 32 * (_G4 >> 3) + 8 * K4 + (_G4 & 7)),
    sign=_SIGN_IN_SIGN_BYTES,
    scale=_SCALE_IN_SIGN_BYTES,
)
_like_plain(
    "iq2_xs_r4",
    d=_half_scales(K4),
    index=bits(8 + 2 * _GROUP) | bits(9 + 2 * _GROUP, 0, 1),
    sign=bits(9 + 2 * _GROUP, 1, 7, codes=_SIGN_CODES),
    scale=nibble(264 + 4 * _IB + K4, _HALF),
)
_like_plain(
    "iq2_s_r4",
    d=_half_scales(K4),
    index=bits(8 + _GROUP) | bits(136 + 4 * (_G8 >> 2) + K4, 2 * (_G8 & 3), 2),
    sign=bits(168 + _GROUP),
    scale=nibble(296 + 4 * _IB + K4, _HALF),
)
_G = _G4 & 7
_like_plain(
    "iq3_s_r4",
    d=_half_scales(K4),
    index=bits(8 + 32 * (_G4 >> 3) + K4 + 8 * (_G & 3) + 4 * (_G >> 2)) | bits(264 + 4 * (_G4 >> 3) + K4, _G, 1),
    sign=bits(296 + 16 * B32 + 4 * K4 + _I, _RUN, 1),
    scale=nibble(424 + _PER32 % 16, _PER32 // 16),
)


@block_type(
    "iq1_s_r4",
    header={"d": _half_scales(K4)},
    index=bits(4 * np.arange(4) + K4) | bits_at(8 * (16 + 2 * K4) + 3 * np.arange(4), 3),
    scale=bits(17 + 2 * K4, 4, 3),
    delta=bits(17 + 2 * K4, 7, 1),
)
def iq1_s_r4(f: Fields) -> np.ndarray:
    """Ternary grid shifted by one eighth, blocks of 32 with f16 row scales."""
    delta = f32(0.125) * sign_bit_factors(f["delta"])
    return f["d"] * f32(2 * f["scale"] + 1) * (grid_values("iq1s_grid", f["index"]) + delta)


_T = np.arange(4)
_T_BYTE = 16 + 4 * (_T >> 1) + K4


@block_type(
    "iq1_m_r4",
    header={"d": _half_scales(K4)},
    index=bits(8 * (_T >> 1) + 4 * (_T & 1) + K4) | bits(_T_BYTE, 4 * (_T & 1), 3),
    delta=bits(_T_BYTE, 4 * (_T & 1) + 3, 1),
    scale=nibble(24 + K4, np.arange(2)),
)
def iq1_m_r4(f: Fields) -> np.ndarray:
    """As iq1_s_r4 with a scale per 16 and a shift per 8 columns."""
    delta = f32(0.125) * sign_bit_factors(f["delta"])
    scale = spread(f["d"] * f32(f["scale"]), 32)
    return scale * (grid_values("iq1s_grid", f["index"]) + spread(delta, 32))


def _signed_bytes(f: Fields) -> np.ndarray:
    return f["d"] * f32(f["q"])


block_type("q8_k_r8", d=_half_scales(K8), q=_q8x(16, K8, 256))(_signed_bytes)
block_type("q8_k_r16", d=_half_scales(K16), q=_q8x(32, K16, 256, codes=np.arange(256) ^ 128))(_signed_bytes)


@block_type("bf16_r16", d=number(4 * K16 + 2 * np.arange(2), "bf16"))
def bf16_r16(f: Fields) -> np.ndarray:
    """bf16 numbers in pairs of columns."""
    return f["d"]
