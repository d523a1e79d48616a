"""Whether rows hold finite values alone, told from the floating point numbers in them: nothing is decoded.

Only numbers with an exponent can make a value NaN or infinite: the elements of float types, the scales and minima of
blocks, row headers and the tensor.
"""

from __future__ import annotations

import numpy as np

from ikpy.quants.codec import codec_of
from ikpy.quants.layout import Field
from ikpy.quants.registry import TensorType

# Bits, without the sign, from which on an element is infinite or NaN.
_ELEMENTS = {
    "f16": ("<u2", 0x7C00),
    "bf16": ("<u2", 0x7F80),
    "bf16_r16": ("<u2", 0x7F80),
    "f32": ("<u4", 0x7F800000),
    "f64": ("<u8", 0x7FF << 52),
}
_WHOLE_NUMBERS = ("i8", "i16", "i32", "i64")
# The same for scales by their kind. Products of a large scale of 32 or 8 bits may be infinite though it is not: 2^100
# and 2^122 leave room for all factors.
_SCALES = {"f16": 0x7C00, "f32": (127 + 100) << 23, "e8m0": 128 + 122}


def surely_finite(data: np.ndarray, row: TensorType, ne0: int) -> bool:
    """Whether all values are finite; False: some are not, or are so large that only decoding tells.

    ``data``: uint8 of whole row groups of ``ne0`` columns; of a type with a scale for the tensor, all of it.
    """
    if row.name in _ELEMENTS:
        dtype, limit = _ELEMENTS[row.name]
        return _all_below(data.view(dtype), limit)
    if row.activation_only or row.name in _WHOLE_NUMBERS:
        return True
    if row.tensor_extra_bytes:
        scale = data[-row.tensor_extra_bytes :][:4]
        return _all_below(scale.view("<u4"), _SCALES["f32"])
    codec = codec_of(row.name)
    groups = data.reshape(-1, row.interleave * row.row_nbytes(ne0))
    headers, blocks = groups[:, : codec.header.nbytes], groups[:, codec.header.nbytes :]
    units = ((codec.header, headers), (codec.block, blocks.reshape(len(groups), -1, codec.block.nbytes)))
    return all(
        _all_below(_words(field, unit), _SCALES[field.kind])
        for layout, unit in units
        for field in layout.fields.values()
        if field.kind in _SCALES
    )


def _words(field: Field, units: np.ndarray) -> np.ndarray:
    """Raw numbers of a field of uint8 [..., bytes of a unit] as unsigned words."""
    dtype = f"<u{field.width // 8}"
    places = np.stack([segment.byte.ravel() for segment in field.segments], axis=-1).ravel()
    first = int(places[0])
    is_run = all(segment.width == 8 for segment in field.segments)
    if is_run and np.array_equal(places, np.arange(first, first + len(places))):
        return units[..., first : first + len(places)].view(dtype)
    return field.read(units).astype(dtype)


def _all_below(words: np.ndarray, limit: int) -> bool:
    """Whether unsigned words are below a limit, their highest bit, a sign, not counted."""
    if not words.size:
        return True
    # Two maxima of words side by side are several times as fast as one of words whose sign is masked.
    words = np.ascontiguousarray(words)
    sign = 1 << (8 * words.itemsize - 1)
    signed = words.view(words.dtype.str.replace("u", "i"))
    return int(signed.max()) < limit and int(words.max()) < sign | limit
