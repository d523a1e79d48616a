"""Where the bits of a block are: one description that both reads and writes it.

A ``Field`` lists, for each of its numbers, the pieces of bytes that hold it, lowest bits first. The formulas
of docs/quant-formats.md become index arrays: ``bits(16 + 32 * B64 + C, 4 * (B32 & 1), 4)`` means
"q(e) = nib(qs[32*b64 + c], b32 & 1)" with qs at offset 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Element indices of a 256-element block and their usual splits (quant-formats.md#conventions).
E = np.arange(256)
C, B16, B32, B64, B128 = E & 31, E >> 4, E >> 5, E >> 6, E >> 7

Fields = dict[str, np.ndarray]


@dataclass(frozen=True)
class Segment:
    """``width`` bits of byte ``byte``, from bit ``shift`` up; arrays [rows, count] of the same shape."""

    byte: np.ndarray
    shift: np.ndarray
    width: int


@dataclass(frozen=True)
class Field:
    """Numbers [rows, count] of a block, each the concatenation of its segments, lowest bits first.

    ``kind`` is how the bits are read: "u" unsigned, "i8"/"i32" two's complement, "f16", "bf16", "f32", "e8m0" (an
    exponent, kept as an integer).
    ``codes`` maps stored codes to the canonical number (a bijection onto its values), for fields that are
    stored in another code than in the plain type.
    """

    segments: tuple[Segment, ...]
    kind: str = "u"
    codes: np.ndarray | None = None

    @property
    def width(self) -> int:
        """Bits of one number."""
        return sum(segment.width for segment in self.segments)

    def __or__(self, high: Field) -> Field:
        """This field with the bits of ``high`` above its own."""
        return replace(self, segments=self.segments + high.segments)

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Raw numbers, uint32 [..., rows, count], of uint8 blocks [..., block_bytes]."""
        value, at = np.zeros(1, np.uint32), 0
        for segment in self.segments:
            piece = (blocks[..., segment.byte] >> segment.shift.astype(np.uint8)) & np.uint8((1 << segment.width) - 1)
            value = value | (piece.astype(np.uint32) << np.uint32(at))
            at += segment.width
        return value if self.codes is None else self.codes[value].astype(np.uint32)

    def write(self, bits_out: np.ndarray, value: np.ndarray) -> None:
        """Put raw numbers [..., rows, count] into a little-endian bit array [..., 8 * block_bytes]."""
        if self.codes is not None:
            inverse = np.zeros(int(self.codes.max()) + 1, np.uint32)
            inverse[self.codes] = np.arange(len(self.codes), dtype=np.uint32)
            value = inverse[value]
        at = 0
        for segment in self.segments:
            for bit in range(segment.width):
                bits_out[..., 8 * segment.byte + segment.shift + bit] = (value >> np.uint32(at)) & np.uint32(1)
                at += 1


def bits(byte: Any, shift: Any = 0, width: int = 8, kind: str = "u", codes: np.ndarray | None = None) -> Field:
    """A field of ``width`` bits at bit ``shift`` of byte ``byte`` (arrays of one or two dimensions)."""
    byte, shift = np.broadcast_arrays(np.atleast_2d(byte), np.atleast_2d(shift))
    return Field((Segment(byte, shift, width),), kind, codes)


def bits_at(position: Any, width: int, codes: np.ndarray | None = None) -> Field:
    """A field of ``width`` bits from bit number ``position`` of the block on; it may cross byte borders."""
    position = np.atleast_2d(position)
    field = bits(position >> 3, position & 7, 1, codes=codes)
    for following in range(1, width):
        field |= bits((position + following) >> 3, (position + following) & 7, 1)
    return field


def nibble(byte: Any, high: Any) -> Field:
    """The low (``high`` = 0) or high nibble of bytes."""
    return bits(byte, 4 * np.asarray(high), 4)


def number(byte: Any, kind: str) -> Field:
    """Little-endian numbers starting at ``byte``: kind "u16", "u32", "i8", "i32", "f16", "bf16" or "f32"."""
    size = {"i8": 1, "u16": 2, "f16": 2, "bf16": 2}.get(kind, 4)
    field = bits(byte)
    for following in range(1, size):
        field |= bits(np.asarray(byte) + following)
    return replace(field, kind=kind.rstrip("0123456789") if kind.startswith("u") else kind)


def as_numbers(raw: np.ndarray, kind: str) -> np.ndarray:
    """Raw unsigned numbers as the numbers they stand for: int32 for integers, float32 for floats."""
    if kind == "f16":
        return raw.astype(np.uint16).view(np.float16).astype(np.float32)
    if kind == "bf16":
        return (raw << np.uint32(16)).view(np.float32)
    if kind == "f32":
        return raw.view(np.float32)
    if kind == "i8":
        return raw.astype(np.uint8).view(np.int8).astype(np.int32)
    return raw.view(np.int32)


def from_numbers(values: np.ndarray, kind: str) -> np.ndarray:
    """Inverse of ``as_numbers``; f16 rounds to nearest even, bf16 truncates
    (quant-formats.md#interleaved-bytes-and-bf16).
    """
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    if kind == "bf16":
        return values.astype(np.float32).view(np.uint32) >> np.uint32(16)
    if kind == "f32":
        return values.astype(np.float32).view(np.uint32)
    mask = np.uint32(0xFF if kind == "i8" else 0xFFFFFFFF)
    return values.astype(np.int32).view(np.uint32) & mask


@dataclass(frozen=True)
class Layout:
    """The fields of a block (or of a row header) of ``nbytes`` bytes."""

    nbytes: int
    fields: Mapping[str, Field]

    def read(self, blocks: np.ndarray) -> Fields:
        """Raw numbers of every field of uint8 blocks [..., nbytes]."""
        return {name: field.read(blocks) for name, field in self.fields.items()}

    def write(self, raw: Fields, shape: tuple[int, ...]) -> np.ndarray:
        """uint8 blocks [*shape, nbytes] holding the raw numbers; bits of no field are 0."""
        bit_array = np.zeros((*shape, 8 * self.nbytes), np.uint8)
        for name, field in self.fields.items():
            field.write(bit_array, raw[name])
        return np.packbits(bit_array, axis=-1, bitorder="little")
