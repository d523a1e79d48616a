"""Registration of the numpy decoders and the public ``dequantize``.

A block type is a layout (which bits are which number) and a value formula. A formula receives the fields of
many blocks at once, each an array [..., rows, count], and returns float32 [..., rows, block elements].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.quants import registry
from ikpy.quants.layout import Field, Fields, Layout, as_numbers
from ikpy.quants.registry import TensorType

ValueFormula = Callable[[Fields], np.ndarray]
WholeTensorDecoder = Callable[[np.ndarray, Sequence[int]], np.ndarray]

_CHUNK_ELEMENTS = (
    1 << 20
)  # keeps the index arrays of a step near the size of a level-2 cache multiple, not of the tensor


@dataclass(frozen=True)
class Codec:
    """Layout of a (group) block and of the row (group) header of one type, and the formula of its values."""

    block: Layout
    header: Layout
    values: ValueFormula

    def numbers(self, raw: Fields) -> Fields:
        """Raw fields as int32 and float32 numbers."""
        fields = {**self.block.fields, **self.header.fields}
        return {name: as_numbers(value, fields[name].kind) for name, value in raw.items()}


_CODECS: dict[str, Codec] = {}
_WHOLE_TENSOR: dict[str, WholeTensorDecoder] = {}


def register(name: str, fields: dict[str, Field], header: dict[str, Field], values: ValueFormula) -> None:
    """Register the codec of a type; sizes come from the type table."""
    row = registry.by_name(name)
    block = Layout(row.block_bytes * row.interleave, fields)
    _CODECS[name] = Codec(block, Layout(row.row_extra_bytes * row.interleave, header), values)


def block_type(
    name: str, header: dict[str, Field] | None = None, **fields: Field
) -> Callable[[ValueFormula], ValueFormula]:
    """Decorator: the function is the value formula of type ``name`` with these fields."""

    def decorate(values: ValueFormula) -> ValueFormula:
        register(name, fields, header or {}, values)
        return values

    return decorate


def whole_tensor(*names: str) -> Callable[[WholeTensorDecoder], WholeTensorDecoder]:
    """Decorator for types not cut into blocks; the function maps (uint8 data, shape) to float32 values."""

    def decorate(decoder: WholeTensorDecoder) -> WholeTensorDecoder:
        _WHOLE_TENSOR.update(dict.fromkeys(names, decoder))
        return decoder

    return decorate


def codec_of(name: str) -> Codec:
    """The codec of a block type; UnsupportedError if the type has none."""
    if name not in _CODECS:
        raise UnsupportedError(f"no block layout for tensor type {name}")
    return _CODECS[name]


def resolve(tensor_type: TensorType | str | int) -> TensorType:
    """A row of the type table from itself, its name or its id."""
    if isinstance(tensor_type, TensorType):
        return tensor_type
    return registry.by_name(tensor_type) if isinstance(tensor_type, str) else registry.by_id(tensor_type)


def f32(values: npt.ArrayLike) -> np.ndarray:
    """Integers as float32, so that products are rounded to binary32 as the formats require."""
    return np.asarray(values, np.float32)


def spread(scales: np.ndarray, elements: int) -> np.ndarray:
    """Scales of sub-blocks [..., n] repeated over the ``elements`` of a block [..., elements]."""
    return np.repeat(scales, elements // scales.shape[-1], axis=-1)


def read_groups(data: np.ndarray, row: TensorType, ne0: int) -> Iterator[Fields]:
    """Raw fields of successive runs of row groups of a matrix.

    ``data`` is uint8 of whole row groups. Header fields have shape [groups, 1, rows, count], block fields
    [groups, blocks per row, rows, count].
    """
    codec = codec_of(row.name)
    groups = data.reshape(-1, row.interleave * row.row_nbytes(ne0))
    step = max(1, _CHUNK_ELEMENTS // max(1, row.interleave * ne0))
    header_nbytes = codec.header.nbytes
    for first in range(0, len(groups), step):
        chunk = groups[first : first + step]
        blocks = chunk[:, header_nbytes:].reshape(len(chunk), -1, codec.block.nbytes)
        yield {**codec.header.read(chunk[:, None, :header_nbytes]), **codec.block.read(blocks)}


def checked_bytes(data: np.ndarray, row: TensorType, shape: Sequence[int]) -> np.ndarray:
    """``data`` as flat uint8; FileFormatError unless it has exactly the bytes of such a tensor."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    expected = row.tensor_nbytes(shape)
    if flat.size != expected:
        raise FileFormatError(f"a {row.name} tensor of shape {tuple(shape)} takes {expected} bytes, not {flat.size}")
    return flat


def dequantize(
    data: np.ndarray,
    tensor_type: TensorType | str | int,
    shape: Sequence[int],
    *,
    compute_scale: bool = False,
) -> np.ndarray:
    """Values of a tensor as float32 in numpy order (``shape`` reversed).

    ``data`` holds the bytes of the tensor, ``shape`` is in file order (ne0 first). ``compute_scale`` applies
    the factor that inference puts on the row scale of some trellis types
    (quant-formats.md#factor-of-the-row-scale). Raises FileFormatError for a wrong size or shape and
    UnsupportedError for types that are never stored.
    """
    row = resolve(tensor_type)
    flat = checked_bytes(data, row, shape)
    if row.name in _WHOLE_TENSOR:
        return _WHOLE_TENSOR[row.name](flat, shape).reshape(tuple(reversed(shape)))
    codec = codec_of(row.name)
    out = np.empty((math.prod(shape[1:]), shape[0]), np.float32)
    done = 0
    for raw in read_groups(flat, row, shape[0]) if out.size else ():
        fields = codec.numbers(raw)
        if compute_scale and row.compute_scale_factor != 1.0:
            fields["d"] = fields["d"] * np.float32(row.compute_scale_factor)
        values = codec.values(fields).swapaxes(1, 2).reshape(-1, shape[0])
        out[done : done + len(values)] = values
        done += len(values)
    return out.reshape(tuple(reversed(shape)))
