"""Nodes of a graph in the order in which they run, and the ops on single elements and rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ikpy.errors import UnsupportedError
from ikpy.graph.ir import ALWAYS, F32, Buffer, CellRange, Node, Value, contiguous_strides

UNARY_KINDS = {
    "silu": 0,
    "gelu": 1,
    "relu": 2,
    "relu_squared": 3,
    "sigmoid": 4,
    "tanh": 5,
    "swiglu_oai": 6,
    "gelu_erf": 7,
    "softplus": 8,
}
# Further kinds of the op, some with parameters.
XIELU, SIGNED_ROOT, EXPONENTIAL = 9, 10, 11
# Sources that kernels read as f32: norm weights, biases, sinks, frequency factors.
FLOAT_SOURCES = {
    "rms_norm": (1,),
    "layer_norm": (1, 2),
    "add": (1,),
    "mul": (1,),
    "rope_table": (1,),
    "attention": (4,),
    "choose_cells": (0, 1),
    "choose_blocks": (0,),
    "mul_mat": (2,),
    "mul_mat_up_gate": (3, 4),
    "mul_mat_id": (3,),
    "mul_mat_id_up_gate": (4, 5),
    "moe_route": (1,),
    "causal_conv": (1, 4),
    "ssm_scan": (2, 5),
    "wkv": (4,),
    "hyper_weights": (1, 2),
    "compress_cells": (0, 1, 2),
}


class ElementwiseOps:
    """Nodes in execution order, and the ops that need no more than their inputs."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._cells = ALWAYS
        self._limited: set[Buffer] = set()

    @contextmanager
    def only(self, cells: CellRange) -> Iterator[None]:
        """Nodes added meanwhile run only with so many attended cells; others must not read what they leave out."""
        before, self._cells = self._cells, cells
        try:
            yield
        finally:
            self._cells = before

    def new(self, *shape: int, type_id: int = F32, dynamic_dim: int | None = None, name: str = "") -> Value:
        """A contiguous arena value."""
        strides = contiguous_strides(type_id, shape)
        full = (*shape, *([1] * (4 - len(shape))))
        nbytes = strides[1] * full[1] * full[2] * full[3]
        return Value(Buffer(nbytes), type_id, full, strides, dynamic_dim=dynamic_dim, name=name)  # type: ignore[arg-type]

    def _emit(
        self,
        kind: str,
        dst: Value,
        src: Sequence[Value | None],
        ip: Sequence[int] = (),
        fp: Sequence[float] = (),
        writes: Sequence[Value] = (),
    ) -> Value:
        for i in FLOAT_SOURCES.get(kind, ()):
            value = src[i]
            if value is not None and value.type_id != F32:
                raise UnsupportedError(f"tensor '{value.name}' has type {value.type_name}; it is read as f32 only")
        cells = self._cells
        if kind == "act_prepare" and src[0] is not None and src[0].buffer not in self._limited:
            cells = ALWAYS  # others may share the prepared activations
        if cells != ALWAYS:
            self._limited.add(dst.buffer)
        self.nodes.append(Node(kind, dst, list(src), list(ip), list(fp), list(writes), cells))
        return dst

    def rms_norm(self, x: Value, weight: Value | None, eps: float) -> Value:
        """x / rms(x) * weight over dimension 0; weight is [n] or one row per dimension 1."""
        return self._emit("rms_norm", self.new(*x.shape), [x, weight, None, None], fp=[eps])

    def layer_norm(self, x: Value, weight: Value | None, bias: Value | None, eps: float) -> Value:
        """(x - mean) / std * weight + bias over dimension 0."""
        return self._emit("layer_norm", self.new(*x.shape), [x, weight, bias], fp=[eps])

    # element-wise

    def add(self, a: Value, b: Value) -> Value:
        """a + b; b is broadcast along dimensions of extent 1."""
        return self._emit("add", self.new(*a.shape), [a, b])

    def mul(self, a: Value, b: Value) -> Value:
        """a * b; b is broadcast along dimensions of extent 1."""
        return self._emit("mul", self.new(*a.shape), [a, b])

    def scale(self, x: Value, factor: float, offset: float = 0.0) -> Value:
        """x * factor + offset."""
        return self._emit("scale", self.new(*x.shape), [x], fp=[factor, offset])

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        return self._emit("softcap", self.new(*x.shape), [x], fp=[cap])

    def xielu(self, x: Value, positive: float, negative: float, beta: float, eps: float) -> Value:
        """beta x + positive x^2 above 0, beta x + negative (e^min(x, eps) - 1 - x) elsewhere."""
        return self._emit("unary", self.new(*x.shape), [x], ip=[XIELU], fp=[positive, negative, beta, eps])

    def block_maxima(self, x: Value, size: int) -> Value:
        """The largest of every `size` elements of rows x [n, T], f32 [n / size rounded up, T]; NaN if one is."""
        return self._emit("block_maxima", self.new(-(-x.shape[0] // size), x.shape[1]), [x], ip=[size])

    def unary(self, x: Value, kind: str) -> Value:
        """An activation function of UNARY_KINDS."""
        return self._emit("unary", self.new(*x.shape), [x], ip=[UNARY_KINDS[kind]])

    def signed_root(self, x: Value, least: float) -> Value:
        """The root of the magnitude of x, or of `least` where that is more, with the sign of x; 0 of 0."""
        return self._emit("unary", self.new(*x.shape), [x], ip=[SIGNED_ROOT], fp=[least])

    def exponential(self, x: Value) -> Value:
        """e^x."""
        return self._emit("unary", self.new(*x.shape), [x], ip=[EXPONENTIAL])

    def gated(self, gate: Value, up: Value, kind: str, limit: float = 0.0) -> Value:
        """act(gate) * up; with a limit above 0 act(min(gate, limit)) * clamp(up, -limit, limit)."""
        return self._emit("gated_unary", self.new(*gate.shape), [gate, up], ip=[UNARY_KINDS[kind]], fp=[limit])

    def copy(self, x: Value, dst: Value) -> Value:
        """Strided copy into dst (f32 or f16)."""
        return self._emit("copy", dst, [x])
