"""Values and nodes of attention for some of the heads: the part of a row of all heads that a device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ikpy.graph.division import Division, Part
from ikpy.graph.ir import Buffer, Gather, Node, Value, contiguous_strides, like
from ikpy.graph.weight_parts import WeightParts

PREPARED = 0
"""In place of the bytes of a row: activations in the format of a product."""

Dims = Sequence[int | None]


def heads_dim(value: Value, row: int, division: Division) -> int | None:
    """Dimension of a view that counts heads, of rows of so many bytes with all heads; None if it cannot be divided."""
    for dim, (n, stride) in enumerate(zip(value.shape, value.strides, strict=True)):
        if n > 1 and n * stride == row:
            is_first = value.offset < stride if dim else not value.offset
            is_cut = division.cuts(n) and all(s < row or s % row == 0 for s in value.strides)
            return dim if is_first and is_cut and value.dynamic_dim is None else None
    return None


def made_row(value: Value, dim: int) -> int:
    """Bytes of the row of all heads of a new value whose dimension counts heads."""
    return value.shape[dim] * value.strides[dim]


# What each op on heads asks for, of itself, the dimension of its first source that counts heads, and those of all.


def _norm(node: Node, dim: int, dims: Dims) -> bool:
    """Every head has a norm of its own; weights are those of one head, or of every head."""
    x, weights, rest = node.src[0], node.src[1:], node.src[3:]
    if node.kind == "rms_norm":
        weights, rest = node.src[1:2], node.src[2:]
    assert x is not None
    return dim == 1 and not any(rest) and all(w is None or w.shape[1] in (1, x.shape[1]) for w in weights)


def _within_heads(node: Node, dim: int, dims: Dims) -> bool:
    return dim > 0


def _elementwise(node: Node, dim: int, dims: Dims) -> bool:
    """Further operands are of the same heads, or the same for all heads."""
    others = zip(node.src[1:], dims[1:], strict=True)
    return all(v is None or other == dim or (other is None and v.shape[dim] == 1) for v, other in others)


def _rows(node: Node, dim: int, dims: Dims) -> bool:
    return dim == 0


HEADWISE: dict[str, Callable[[Node, int, Dims], bool]] = {
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope": _within_heads,
    "hadamard": _within_heads,
    "scale": _elementwise,
    "softcap": _elementwise,
    "unary": _elementwise,
    "gated_unary": _elementwise,
    "mul": _elementwise,
    "add": _elementwise,
    "copy": _elementwise,
    "get_rows": _rows,
}
"""Whether the op of a kind can be done for some of the heads."""


class HeadParts:
    """Parts of weights and caches, made once for all graphs."""

    def __init__(self, weights: WeightParts) -> None:
        self.weights = weights
        self._caches: dict[tuple[Buffer, Part], Buffer] = {}

    def cache(self, whole: Value, heads: Part) -> Value:
        """Some heads of a cache [n, H, n_cells]; the host's copy of them is a part of that of all."""
        key = whole.buffer, heads
        if key not in self._caches:
            head, row = whole.strides[1], whole.strides[2]
            gather = Gather(whole.shape[2], row, ((heads.start * head, heads.length * head),))
            name = f"{whole.buffer.name} [{heads.start}:{heads.start + heads.length}]"
            owner, address = whole.buffer.owner, whole.buffer.address
            self._caches[key] = Buffer(gather.nbytes, address, owner, "cache", name, gather)
        shape = whole.shape[0], heads.length, *whole.shape[2:]
        return replace(whole, buffer=self._caches[key], shape=shape, strides=contiguous_strides(whole.type_id, shape))

    def copy(self, whole: Value, heads: Part) -> Value:
        """A cache that the device of some heads has all of."""
        key = whole.buffer, heads
        if key not in self._caches:
            buffer, name = whole.buffer, f"{whole.buffer.name} on {heads.device}"
            self._caches[key] = Buffer(buffer.nbytes, buffer.address, buffer.owner, "cache", name)
        return replace(whole, buffer=self._caches[key])

    def cache_parts(self, whole: Buffer) -> list[tuple[str, Buffer]]:
        """The parts or copies that were made of a cache, with their devices."""
        return [(heads.device, part) for (buffer, heads), part in self._caches.items() if buffer is whole]


class PartOfHeads:
    """Makes the nodes of one part of a graph. rows: bytes of the row of all heads of a token, by buffer."""

    def __init__(self, parts: HeadParts, division: Division, part: Part, rows: Mapping[Buffer, int]) -> None:
        self._parts = parts
        self._division = division
        self._part = part
        self._rows = rows
        self._buffers: dict[Buffer, Buffer] = {}
        self._values: dict[int, Value] = {}  # by identity; the nodes of the graph hold the keys

    def projection(self, node: Node) -> Node:
        """The rows of a projection."""
        weight, x, bias = node.src
        assert weight is not None
        rows, weights = self._range(weight.shape[1]), self._parts.weights
        src = [weights.rows(weight, rows), x, weights.bias(bias, rows)]
        return replace(node, dst=self._value(node.dst), src=src)

    def output(self, node: Node, *, first: bool) -> Node:
        """The columns of the output projection; the first part adds the bias."""
        weight, x, bias = node.src
        assert x is not None
        src = [self._parts.weights.columns(weight, self._part), self._value(x), bias if first else None]
        return replace(node, dst=like(node.dst), src=src)

    def node(self, node: Node) -> Node:
        """Any other op."""
        src = [None if value is None else self._value(value) for value in node.src]
        ip = node.ip
        if node.kind == "attention":
            q, sinks = node.src[0], node.src[4]
            assert q is not None
            heads = self._range(q.shape[1])
            src[4] = self._parts.weights.bias(sinks, heads)
            # Slopes of biases are those of the heads of the model.
            ip = [ip[0], min(ip[1], heads.length), *((ip[2] + heads.start, ip[3]) if len(ip) > 2 else ())]
        elif node.kind in ("rms_norm", "layer_norm"):
            src[1:] = [self._norm_weight(value) for value in node.src[1:]]
        return replace(node, dst=self._value(node.dst), src=src, ip=ip)

    def _norm_weight(self, value: Value | None) -> Value | None:
        if value is None or value.shape[1] == 1:
            return value
        return self._parts.weights.rows(value, self._range(value.shape[1]))

    def _range(self, n: int) -> Part:
        """The part of so many rows of all heads."""
        return self._division.of(n, self._part)

    def _value(self, value: Value) -> Value:
        """The part of a value of the region; others as they are."""
        if id(value) not in self._values:
            self._values[id(value)] = self._new_value(value)
        return self._values[id(value)]

    def _new_value(self, value: Value) -> Value:
        if value.buffer.role == "cache":
            return self._parts.cache(value, self._range(value.shape[1]))
        if value.buffer not in self._rows:
            return value
        row = self._rows[value.buffer]
        if row == PREPARED:
            return replace(value, buffer=self._buffer(value.buffer, value.buffer.nbytes))
        dim, part = heads_dim(value, row, self._division), self._range(row).length
        assert dim is not None
        shape, strides = list(value.shape), [s // row * part if s >= row else s for s in value.strides]
        shape[dim] = self._range(shape[dim]).length
        buffer = self._buffer(value.buffer, value.buffer.nbytes // row * part)
        return replace(
            value,
            buffer=buffer,
            shape=(shape[0], shape[1], shape[2], shape[3]),
            strides=(strides[0], strides[1], strides[2], strides[3]),
        )

    def _buffer(self, whole: Buffer, nbytes: int) -> Buffer:
        return self._buffers.setdefault(whole, Buffer(nbytes))
