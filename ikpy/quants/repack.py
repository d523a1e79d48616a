"""Moving rows between a plain type and its interleaved form (quant-formats.md#repacking)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ikpy.errors import UsageError
from ikpy.quants import registry
from ikpy.quants.codec import Codec, checked_bytes, codec_of, resolve
from ikpy.quants.layout import Fields, Layout, as_numbers, from_numbers, number
from ikpy.quants.registry import TensorType

_CHUNK_ELEMENTS = 1 << 17  # the bit arrays of a step take eight bytes per byte of data


def _pair_codec(kind: str) -> Codec:
    """Two-byte floats as blocks of two columns, the unit of bf16_r16."""
    return Codec(Layout(4, {"d": number(2 * np.arange(2), kind)}), Layout(0, {}), lambda fields: fields["d"])


_PAIRS = {"f16": _pair_codec("f16"), "bf16": _pair_codec("bf16")}


def _codec(row: TensorType) -> Codec:
    return _PAIRS[row.name] if row.name in _PAIRS else codec_of(row.name)


def _permutations() -> frozenset[tuple[str, str]]:
    packing = {(row.repack_of, row.name) for row in registry.all_types() if row.repack_of}
    packing |= {("q4_0", row.name) for row in registry.all_types() if row.name.startswith("q4_0_")}
    unpacking = {(to, source) for source, to in packing if source != "q8_K"}
    return frozenset(packing | unpacking | {("f16", "bf16_r16")})


PERMUTATIONS = _permutations()
"""Names (from, to) that ``repack`` converts. F16 -> BF16_R16 truncates and Q8_K -> Q8_K_R8 or Q8_K_R16 rounds
the scales to f16; everything else is lossless."""


def repack(
    data: np.ndarray,
    from_type: TensorType | str | int,
    to_type: TensorType | str | int,
    shape: Sequence[int],
) -> np.ndarray:
    """Bytes of a tensor converted from a plain type to its interleaved form or back.

    ``data`` is uint8 holding a tensor of ``shape`` (ne0 first); the result is flat uint8. Raises UsageError
    for a pair of types that are not permutations of each other, FileFormatError where ne1 is not a multiple
    of the rows interleaved.
    """
    source, target = resolve(from_type), resolve(to_type)
    if (source.name, target.name) not in PERMUTATIONS:
        raise UsageError(f"{source.name} cannot be repacked to {target.name}; quantize instead")
    flat = checked_bytes(data, source, shape)
    out = np.empty(target.tensor_nbytes(shape), np.uint8)
    rows = max(source.interleave, target.interleave)
    n_groups = math.prod(shape[1:]) // rows
    groups, out_groups = flat.reshape(n_groups, -1), out.reshape(n_groups, -1)
    step = max(1, _CHUNK_ELEMENTS // max(1, rows * shape[0]))
    for first in range(0, n_groups, step):
        chunk = groups[first : first + step]
        out_groups[first : first + step] = _convert(chunk, source, target, rows)
    return out


def _convert(groups: np.ndarray, source: TensorType, target: TensorType, rows: int) -> np.ndarray:
    """Byte rows [groups, bytes of ``rows`` rows] of one type as those of the other."""
    read, write = _codec(source), _codec(target)
    units = groups.reshape(len(groups) * rows // source.interleave, -1)
    blocks = units[:, read.header.nbytes :].reshape(len(units), -1, read.block.nbytes)
    header = units[:, None, : read.header.nbytes]
    raw = {
        **_regrouped(read.header.read(header), target.interleave),
        **_regrouped(read.block.read(blocks), target.interleave),
    }
    _match_kinds(raw, read, write)
    if "sum" in write.header.fields and "sum" not in raw:
        total = as_numbers(raw["q"], "i8").sum(axis=(1, 3), dtype=np.int32)
        raw["sum"] = from_numbers(total[:, None, :, None], "i32")
    n_units = len(groups) * rows // target.interleave
    header_out = write.header.write(raw, (n_units, 1)).reshape(n_units, -1)
    blocks_out = write.block.write(raw, (n_units, blocks.shape[1])).reshape(n_units, -1)
    return np.concatenate([header_out, blocks_out], axis=1).reshape(len(groups), -1)


def _regrouped(raw: Fields, interleave: int) -> Fields:
    """Fields [units, blocks, rows per unit, count] with ``interleave`` rows per unit instead."""
    regrouped = {}
    for name, value in raw.items():
        row_first = value.swapaxes(1, 2)
        blocks, count = value.shape[1], value.shape[3]
        regrouped[name] = row_first.reshape(-1, interleave, blocks, count).swapaxes(1, 2)
    return regrouped


def _match_kinds(raw: Fields, read: Codec, write: Codec) -> None:
    """Convert numbers that the two types store in different float formats, in place."""
    source, target = (
        {**read.block.fields, **read.header.fields},
        {**write.block.fields, **write.header.fields},
    )
    for name in raw.keys() & target.keys():
        if source[name].kind != target[name].kind:
            raw[name] = from_numbers(as_numbers(raw[name], source[name].kind), target[name].kind)
