"""Values and nodes of latent attention for some of the heads.

Every buffer of the region is known: it has rows of heads, is a copy that does not depend on heads, or holds activations
that were prepared of one of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ikpy.graph.division import Part
from ikpy.graph.head_parts import HeadParts
from ikpy.graph.ir import Buffer, Node, Value, contiguous_strides, like
from ikpy.quants import registry


class HeadRow(NamedTuple):
    """The row of a token: heads first .. first + n of nbytes each."""

    first: int
    n: int
    nbytes: int

    @property
    def total(self) -> int:
        """Bytes of the row."""
        return self.n * self.nbytes

    def of(self, heads: Part) -> HeadRow | None:
        """What a part of all heads has of it."""
        start, end = max(self.first, heads.start), min(self.first + self.n, heads.start + heads.length)
        return HeadRow(start, end - start, self.nbytes) if start < end else None


class Heads(NamedTuple):
    """The dimension of a view that counts heads, and which these are."""

    dim: int
    first: int
    n: int


def heads_of(value: Value, row: HeadRow) -> Heads | None:
    """The heads in a view of rows; None if no dimension counts them."""
    start, inner = divmod(value.offset, row.nbytes)
    counted = [d for d in (1, 2, 3) if value.strides[d] == row.nbytes and value.dynamic_dim != d]
    if counted:
        dim, n = counted[0], value.shape[counted[0]]
    else:
        (n, rest), dim = divmod(value.shape[0] * value.strides[0], row.nbytes), 0
        if not n or rest or inner:
            return None
    others = (s for d, s in enumerate(value.strides) if d != dim)
    if start + n > row.n or not all(s < row.nbytes or s % row.total == 0 for s in others):
        return None
    return Heads(dim, row.first + start, n)


def new_row(value: Value, heads: Heads) -> HeadRow | None:
    """The rows of a new buffer, by the first view of it that is written; None if it has no such rows."""
    if heads.dim == 0:
        nbytes, rest = divmod(value.shape[0] * value.strides[0], heads.n)
        is_whole = value.is_contiguous and not value.offset
        return HeadRow(heads.first, heads.n, nbytes) if is_whole and not rest else None
    nbytes = value.strides[heads.dim]
    larger = [s for d, s in enumerate(value.strides) if d not in (0, heads.dim) and s >= nbytes > 0]
    if not larger or min(larger) % nbytes or value.buffer.nbytes % min(larger):
        return None
    return HeadRow(heads.first - value.offset // nbytes, min(larger) // nbytes, nbytes)


def whole_matrix(weight: Value) -> Value:
    """All rows of the tensor that a matrix [K, N] or [K, N, H] is some of."""
    row = registry.by_id(weight.type_id).row_nbytes(weight.shape[0])
    shape = weight.shape[0], weight.buffer.nbytes // row, 1, 1
    return Value(weight.buffer, weight.type_id, shape, contiguous_strides(weight.type_id, shape), name=weight.name)


@dataclass
class Known:
    """What the buffers of a region hold. n_heads: of the layer.

    rows: of heads, by buffer. copies: buffers whose values every device makes for itself. prepared: what activations
    were prepared of. stored: caches of rows of latents, of which every device has all; divided: those of heads.
    """

    n_heads: int
    rows: dict[Buffer, HeadRow] = field(default_factory=dict)
    copies: set[Buffer] = field(default_factory=set)
    prepared: dict[Buffer, Value] = field(default_factory=dict)
    stored: set[Buffer] = field(default_factory=set)
    divided: set[Buffer] = field(default_factory=set)

    def __contains__(self, value: Value) -> bool:
        buffer = value.buffer
        return any(buffer in held for held in (self.rows, self.copies, self.prepared, self.stored, self.divided))

    def heads(self, value: Value) -> Heads | None:
        """The heads in a view; None for what has no rows of heads."""
        row = self.rows.get(value.buffer)
        return heads_of(value, row) if row else None

    def rows_per_head(self, weight: Value) -> int:
        """Rows of a matrix that belong to one head; 0 if that is no whole number."""
        n, rest = divmod(whole_matrix(weight).shape[1], self.n_heads)
        return 0 if rest else n


class LatentPart:
    """Makes the nodes of one part of a graph."""

    def __init__(self, parts: HeadParts, known: Known, heads: Part, *, first: bool) -> None:
        self._parts = parts
        self._known = known
        self._heads = heads
        self._first = first
        self._buffers: dict[Buffer, Buffer] = {}
        self._values: dict[int, Value | None] = {}  # by identity; the nodes of the graph hold the keys

    def output(self, node: Node) -> Node:
        """The columns of the output projection; the first part adds the bias."""
        weight, x, bias = node.src
        assert weight is not None and x is not None
        columns = self._times(weight.shape[0] // self._known.n_heads)
        src = [self._parts.weights.columns(weight, columns), self._value(x), bias if self._first else None]
        return replace(node, dst=like(node.dst), src=src)

    def node(self, node: Node) -> Node | None:
        """Any other op; None without heads of the part."""
        dst = self._value(node.dst)
        if dst is None:
            return None
        src, ip = [None if value is None else self._value(value) for value in node.src], node.ip
        if node.kind == "mul_mat":
            weight, _, bias = node.src
            assert weight is not None
            src[0] = self._weight(weight)
            src[2] = self._parts.weights.bias(bias, self._times(self._known.rows_per_head(weight)))
        elif node.kind == "attention":
            ip = [ip[0], min(ip[1], dst.shape[1])]
        elif node.kind == "copy":
            src[0] = self._repeated(node, dst)
        return replace(node, dst=dst, src=src, ip=ip)

    def _times(self, n: int) -> Part:
        """Rows or columns of the part, n of every head."""
        return Part(self._heads.device, n * self._heads.start, n * self._heads.length)

    def _weight(self, weight: Value) -> Value:
        """Rows [K, N] of the heads, or of those of them that a slice has; a matrix of every head [K, N, H]."""
        n = self._known.rows_per_head(weight)
        part = self._parts.weights.rows(whole_matrix(weight), self._times(n))
        assert part is not None
        row = part.strides[1]
        if weight.shape[2] > 1:
            shape = (weight.shape[0], weight.shape[1], self._heads.length, 1)
            strides = (weight.strides[0], row, weight.strides[2], weight.strides[2] * self._heads.length)
            return replace(weight, buffer=part.buffer, shape=shape, strides=strides)
        mine = HeadRow(weight.offset // (n * row), weight.shape[1] // n, n * row).of(self._heads)
        assert mine is not None
        return part.slice(1, n * (mine.first - self._heads.start), n * mine.n)

    def _repeated(self, node: Node, dst: Value) -> Value | None:
        """What is copied: of a value that is the same for all heads as often as there are heads."""
        source, heads = node.src[0], self._known.heads(node.dst)
        assert source is not None
        if source in self._known or heads is None:
            return self._value(source)
        shape = list(source.shape)
        shape[heads.dim] = dst.shape[heads.dim]
        return replace(source, shape=(shape[0], shape[1], shape[2], shape[3]))

    def _value(self, value: Value) -> Value | None:
        """The part of a value of the region, None without heads of the part; others as they are."""
        if id(value) not in self._values:
            self._values[id(value)] = self._new_value(value)
        return self._values[id(value)]

    def _new_value(self, value: Value) -> Value | None:
        buffer, known = value.buffer, self._known
        if buffer in known.stored:
            return self._parts.copy(value, self._heads)
        if buffer in known.divided:
            return self._parts.cache(value, self._heads)
        if buffer in known.copies:
            return replace(value, buffer=self._buffer(buffer, buffer.nbytes))
        if buffer in known.prepared:
            is_empty = self._value(known.prepared[buffer]) is None
            return None if is_empty else replace(value, buffer=self._buffer(buffer, buffer.nbytes))
        return self._of_rows(value, known.rows[buffer]) if buffer in known.rows else value

    def _of_rows(self, value: Value, row: HeadRow) -> Value | None:
        whole, mine = heads_of(value, row), row.of(self._heads)
        assert whole is not None
        found = HeadRow(whole.first, whole.n, row.nbytes).of(self._heads)
        if mine is None or found is None:
            return None
        shape = list(value.shape)
        shape[whole.dim] = found.n if whole.dim else found.total // value.strides[0]
        strides = [s // row.total * mine.total if s >= row.total else s for s in value.strides]
        if whole.dim:
            strides[whole.dim] = row.nbytes
        return replace(
            value,
            buffer=self._buffer(value.buffer, value.buffer.nbytes // row.total * mine.total),
            shape=(shape[0], shape[1], shape[2], shape[3]),
            strides=(strides[0], strides[1], strides[2], strides[3]),
            offset=value.offset % row.nbytes + (found.first - mine.first) * row.nbytes,
        )

    def _buffer(self, whole: Buffer, nbytes: int) -> Buffer:
        return self._buffers.setdefault(whole, Buffer(nbytes))
