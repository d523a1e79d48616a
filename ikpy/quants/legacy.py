"""Plain numbers and the types of blocks with one scale (quant-formats.md#blocks-with-one-scale)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ikpy.quants.codec import block_type, f32, whole_tensor
from ikpy.quants.layout import Fields, bits, nibble, number
from ikpy.quants.tables import table

_E = np.arange(32)
_J, _H = _E & 15, _E >> 4


def _number_decoder(name: str, dtype: str) -> None:
    @whole_tensor(name)
    def decode(data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return data.view(dtype).astype(np.float32)


for _name, _dtype in (("f32", "<f4"), ("f16", "<f2"), ("f64", "<f8")):
    _number_decoder(_name, _dtype)
for _name, _dtype in (("i8", "i1"), ("i16", "<i2"), ("i32", "<i4"), ("i64", "<i8")):
    _number_decoder(_name, _dtype)


@whole_tensor("bf16")
def bf16(data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The upper half of a binary32."""
    return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


@block_type("q4_0", d=number(0, "f16"), q=nibble(2 + _J, _H))
def q4_0(f: Fields) -> np.ndarray:
    """16 levels around 0."""
    return f["d"] * f32(f["q"] - 8)


@block_type("q4_1", d=number(0, "f16"), m=number(2, "f16"), q=nibble(4 + _J, _H))
def q4_1(f: Fields) -> np.ndarray:
    """16 levels above a minimum."""
    return f["d"] * f32(f["q"]) + f["m"]


@block_type("q5_0", d=number(0, "f16"), q=nibble(6 + _J, _H) | bits(2 + (_E >> 3), _E & 7, 1))
def q5_0(f: Fields) -> np.ndarray:
    """32 levels around 0."""
    return f["d"] * f32(f["q"] - 16)


@block_type("q5_1", d=number(0, "f16"), m=number(2, "f16"), q=nibble(8 + _J, _H) | bits(4 + (_E >> 3), _E & 7, 1))
def q5_1(f: Fields) -> np.ndarray:
    """32 levels above a minimum."""
    return f["d"] * f32(f["q"]) + f["m"]


@block_type("q6_0", d=number(0, "f16"), q=nibble(10 + _J, _H) | bits(2 + (_J & 7), 4 * (_J >> 3) + 2 * _H, 2))
def q6_0(f: Fields) -> np.ndarray:
    """64 levels around 0."""
    return f["d"] * f32(f["q"] - 32)


@block_type("q8_0", d=number(0, "f16"), q=number(2 + _E, "i8"))
def q8_0(f: Fields) -> np.ndarray:
    """Signed bytes."""
    return f["d"] * f32(f["q"])


@block_type("q8_KV", header={"d": number(0, "f32"), "sum": number(4, "i32")}, q=number(_E, "i8"))
def q8_kv(f: Fields) -> np.ndarray:
    """Signed bytes with one scale per row."""
    return f["d"] * f32(f["q"])


@block_type("q8_K", d=number(0, "f32"), q=number(8 + np.arange(256), "i8"))
def q8_k(f: Fields) -> np.ndarray:
    """Signed bytes with one f32 scale per 256; activations only."""
    return f["d"] * f32(f["q"])


@block_type("mxfp4", d=bits(0, kind="e8m0"), q=nibble(1 + _J, _H))
def mxfp4(f: Fields) -> np.ndarray:
    """e2m1 numbers with a power-of-two scale; the table is doubled, hence the halved scale."""
    scale = table("e8m0_half_f32_bits")[f["d"]].view(np.float32)
    return scale * f32(table("kvalues_mxfp4")[f["q"]])


_E64 = np.arange(64)


@block_type("nvfp4", s=bits(np.arange(4)), q=nibble(4 + 8 * (_E64 >> 4) + (_E64 & 7), _E64 >> 3 & 1))
def nvfp4(f: Fields) -> np.ndarray:
    """e2m1 numbers with a scale per 16, an FP8 number e4m3 whose sign does not count; the table is doubled, hence the
    halved scale."""
    return f32(ue4m3_halves()[f["s"]]).repeat(16, axis=-1) * f32(table("kvalues_mxfp4")[f["q"]])


@functools.cache
def ue4m3_halves() -> np.ndarray:
    """Half the value of the 256 scales of nvfp4, float32: bits 3 to 6 are an exponent (bias 7); 127 counts as 0."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    halves = np.where(exponent == 0, mantissa * 2.0**-10, (8 + mantissa) * 2.0 ** (exponent - 11.0))
    return np.where(code == 127, 0.0, halves).astype(np.float32)


@block_type("q1_0_g128", d=number(0, "f16"), q=bits(2 + (np.arange(128) >> 3), np.arange(128) & 7, 1))
def q1_0_g128(f: Fields) -> np.ndarray:
    """Signs."""
    return np.where(f["q"] != 0, f["d"], -f["d"])
