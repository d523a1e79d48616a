"""Graph IR: typed, strided values over buffers, and op nodes in execution order.

A Value is a view (shape, byte strides, offset) of a Buffer. Arena buffers get their address from the memory planner;
external buffers (weights, caches, inputs) bring one. Shapes are in ggml order: shape[0] is contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ikpy.quants import registry

F32 = 0
F16 = 1
I32 = 26
I64 = 27
PLANNED_ADDRESS = 64
"""Address of external memory in a plan that is only measured, never run."""


Role = Literal["value", "weight", "cache", "input", "host"]


@dataclass(frozen=True)
class Gather:
    """Where the bytes of a part lie: the ranges (start, length), `count` times, `stride` bytes apart."""

    count: int
    stride: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.count * sum(length for _, length in self.ranges)


@dataclass(eq=False)
class Buffer:
    """Memory behind values: address is None for arena buffers; owner keeps external memory alive.

    role: what external memory holds; "host" stays where it is whatever runs the graph. name: of a weight or cache.
    gather: of a weight that is a part of what begins at the address. factor: what numbers of a weight are multiplied
    by, of several matrices (experts) a value f32 [1, E] with one for each; products apply it to their results.
    """

    nbytes: int
    address: int | None = None
    owner: object = None
    role: Role = "value"
    name: str = ""
    gather: Gather | None = None
    factor: float | Value | None = None


@dataclass(eq=False)
class Value:
    """A strided view of a buffer. dynamic_dim: the dimension that is n_kv at run time (shape holds its maximum)."""

    buffer: Buffer
    type_id: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    offset: int = 0
    dynamic_dim: int | None = None
    name: str = ""

    @property
    def type_name(self) -> str:
        """Name of the tensor type."""
        return registry.by_id(self.type_id).name

    @property
    def n_elements(self) -> int:
        a, b, c, d = self.shape
        return a * b * c * d

    def view(
        self, shape: Sequence[int], strides: Sequence[int], offset: int = 0, dynamic_dim: int | None = None
    ) -> Value:
        """A view with the given shape, byte strides of dimensions 1.. and byte offset relative to this value."""
        item = registry.by_id(self.type_id).row_nbytes(1) if self._is_plain else 0
        return Value(
            self.buffer,
            self.type_id,
            _pad(shape),
            _pad((item, *strides), fill=0),
            self.offset + offset,
            dynamic_dim,
        )

    @property
    def _is_plain(self) -> bool:
        return registry.by_id(self.type_id).block_elements == 1

    def reshape(self, *shape: int) -> Value:
        """Same elements with another shape; the value must be contiguous."""
        if not self.is_contiguous:
            raise ValueError(f"reshape of a non-contiguous value {self.name} {self.shape}")
        strides = contiguous_strides(self.type_id, shape)
        result = Value(self.buffer, self.type_id, _pad(shape), strides, self.offset, name=self.name)
        if result.n_elements != self.n_elements:
            raise ValueError(f"reshape of {self.shape} to {shape}")
        return result

    def span(self) -> tuple[int, int]:
        """First byte in the buffer and the one behind the last, of a value with rows."""
        steps = sum((n - 1) * stride for n, stride in zip(self.shape[1:], self.strides[1:], strict=True))
        return self.offset, min(self.offset + steps + self.strides[1], self.buffer.nbytes)

    def slice0(self, start: int, length: int) -> Value:
        """Elements start .. start+length of dimension 0 (plain types only)."""
        item = self.strides[0]
        shape = (length, *self.shape[1:])
        return Value(self.buffer, self.type_id, shape, self.strides, self.offset + start * item, self.dynamic_dim)

    def slice(self, dim: int, start: int, length: int) -> Value:
        """Entries start .. start+length of a dimension other than 0."""
        shape = list(self.shape)
        shape[dim] = length
        return Value(
            self.buffer,
            self.type_id,
            _pad(shape),
            self.strides,
            self.offset + start * self.strides[dim],
            None if self.dynamic_dim == dim else self.dynamic_dim,
            self.name,
        )

    def permute(self, *order: int) -> Value:
        """Dimensions reordered; dimension 0 must stay first."""
        order = (*order, *range(len(order), 4))
        dynamic = None if self.dynamic_dim is None else order.index(self.dynamic_dim)
        return Value(
            self.buffer,
            self.type_id,
            _pad([self.shape[i] for i in order]),
            _pad([self.strides[i] for i in order]),
            self.offset,
            dynamic,
        )

    @property
    def is_contiguous(self) -> bool:
        expected = contiguous_strides(self.type_id, self.shape)
        return all(n == 1 or s == e for n, s, e in zip(self.shape[1:], self.strides[1:], expected[1:], strict=True))


def _pad(values: Sequence[int], fill: int = 1) -> tuple[int, int, int, int]:
    padded = (*values, *([fill] * (4 - len(values))))
    return padded[0], padded[1], padded[2], padded[3]


def contiguous_strides(type_id: int, shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Byte strides of a contiguous tensor; strides[0] is the item size, or 0 for block types."""
    return _strides(type_id, tuple(shape))


@functools.lru_cache(maxsize=1024)  # a graph has few different shapes
def _strides(type_id: int, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    kind = registry.by_id(type_id)
    row = kind.row_nbytes(shape[0])
    full = _pad(shape)
    item = kind.block_bytes if kind.block_elements == 1 else 0
    return item, row, row * full[1], row * full[1] * full[2]


def like(value: Value, *shape: int) -> Value:
    """A contiguous value of the same type in a buffer of its own, of the same shape if none is given."""
    full = _pad(shape or value.shape)
    strides = contiguous_strides(value.type_id, full)
    return Value(Buffer(strides[3] * full[3]), value.type_id, full, strides)


@dataclass(frozen=True)
class CellRange:
    """Numbers of attended cells n_kv with above < n_kv <= upto; 0: no limit."""

    above: int = 0
    upto: int = 0


ALWAYS = CellRange()


@dataclass(eq=False)
class Node:
    """One op: destination, sources (None = absent), integer and float parameters, and further values it writes.

    cells: where it runs; on a device always.
    """

    kind: str
    dst: Value
    src: list[Value | None]
    ip: list[int] = field(default_factory=list)
    fp: list[float] = field(default_factory=list)
    writes: list[Value] = field(default_factory=list)
    cells: CellRange = ALWAYS


def external(
    address: int, owner: object, type_id: int, shape: Sequence[int], name: str = "", role: Role = "host"
) -> Value:
    """A contiguous value over memory that exists already."""
    nbytes = registry.by_id(type_id).tensor_nbytes(_pad(shape))
    buffer = Buffer(nbytes, address, owner, role, name)
    return Value(buffer, type_id, _pad(shape), contiguous_strides(type_id, shape), name=name)
