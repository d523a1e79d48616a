"""Graphs over one picture, built once for every size (plans.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ikpy._native import core
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F16, F32, I32, Value, external
from ikpy.vision.weights import Bounds, Linear, Mlp, Norm, value_of


class PictureGraph:
    """A graph, what it is built over, and the compound operations of encoders.

    patches: f32 [elements of a patch, n], the picture; rows, columns: n patches in that many. Arrays that depend on the
    size alone (tables of positions, indices) are constants of the graph.
    """

    def __init__(self, patches: NDArray[np.float32], rows: int, columns: int) -> None:
        self.graph = Graph(core)
        self.rows = rows
        self.columns = columns
        self.patches = value_of(patches, role="input")
        self.constants: list[NDArray[np.generic]] = []
        self._ranges: dict[tuple[int, ...], tuple[object, Value]] = {}
        self._masks: dict[int, Value] = {}

    @property
    def n_patches(self) -> int:
        """All of them."""
        return self.rows * self.columns

    @property
    def n_bytes(self) -> int:
        """Of the patches and all constants."""
        return self.patches.buffer.nbytes + sum(array.nbytes for array in self.constants)

    def floats(self, array: NDArray[np.floating]) -> Value:
        """A constant float32 array."""
        return self._constant(np.ascontiguousarray(array, np.float32), F32)

    def indices(self, array: NDArray[np.integer]) -> Value:
        """A constant i32 array, as for `Graph.get_rows` and rotation positions."""
        return self._constant(np.ascontiguousarray(array, np.int32), I32)

    def _constant(self, array: NDArray[np.generic], type_id: int) -> Value:
        self.constants.append(array)
        return external(array.ctypes.data, array, type_id, array.shape[::-1], role="input")

    def linear(self, layer: Linear, x: Value, *, dst: Value | None = None) -> Value:
        """weight x + bias for x [n_in, T], within the bounds of the layer."""
        x = self.graph.mul_mat(layer.weight, self.bounded(x, layer.inputs), layer.bias, dst=dst)
        return self.bounded(x, layer.results)

    def bounded(self, x: Value, bounds: Bounds) -> Value:
        """x with what exceeds the bounds put to them."""
        g, (low, high) = self.graph, bounds
        if math.isinf(low) or math.isinf(high):
            if math.isfinite(high):
                x = g.scale(g.unary(g.scale(x, -1.0, high), "relu"), -1.0, high)
            return x if math.isinf(low) else g.scale(g.unary(g.scale(x, 1.0, -low), "relu"), 1.0, low)
        middle, reach = (low + high) / 2, (high - low) / 2
        if reach == 0:
            return g.scale(x, 0.0, low)
        around = g.scale(x, 1.0, -middle) if middle else x
        share = min(reach, 1.0)  # of the gate, 1, which has the same bound
        kept = g.gated(g.scale(x, 0.0, 1.0), around, "relu", reach)
        return g.scale(kept, 1 / share, middle) if middle or share < 1 else kept

    def layer_norm(self, norm: Norm, x: Value, eps: float) -> Value:
        """LayerNorm over dimension 0."""
        return self.graph.layer_norm(x, norm.weight, norm.bias, eps)

    def activated(self, x: Value, kind: str) -> Value:
        """An activation function, gelu_quick (x sigmoid(1.702 x)) among them."""
        if kind == "gelu_quick":
            return self.graph.gated(self.graph.scale(x, 1.702), x, "sigmoid")
        return self.graph.unary(x, kind)

    def mlp(self, mlp: Mlp, x: Value, activation: str) -> Value:
        """second(activation(first x))."""
        return self.linear(mlp.second, self.activated(self.linear(mlp.first, x), activation))

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        scale: float,
        ranges: NDArray[np.integer] | None = None,
        sinks: Value | None = None,
        softcap: float = 0.0,
    ) -> Value:
        """softmax(scale * q.k) v as f32 [d * H, T] of q [d, H, T], k and v [d, Hk, T].

        ranges [T, 2]: first token that each sees and the one behind the last; None: all see all. sinks [H], softcap:
        as those of `Graph.attention`.
        """
        mask = self._mask(k.shape[2], q.shape[2]), self._seen(ranges, k.shape[2], q.shape[2])
        out = self.graph.attention(q, [k], v, mask, scale=scale, flash=True, sinks=sinks, softcap=softcap)
        return out.reshape(out.shape[0] * out.shape[1], out.shape[2])

    def _mask(self, n: int, n_rows: int) -> Value:
        """Nothing is hidden: one row of n cells stands for all."""
        if n not in self._masks:
            self._masks[n] = self._constant(np.zeros(n, np.float16), F16)
        return self._masks[n].view((n, n_rows), (0,))

    def _seen(self, ranges: NDArray[np.integer] | None, n: int, n_rows: int) -> Value:
        """Ranges [n_rows, 2], once for all layers that have the same."""
        key = (n, n_rows) if ranges is None else (id(ranges),)
        if key not in self._ranges:
            array = np.tile(np.array([[0, n]]), (n_rows, 1)) if ranges is None else ranges
            self._ranges[key] = ranges, self.indices(array)
        return self._ranges[key][1]

    def side_by_side(self, parts: Sequence[Value]) -> Value:
        """f32 [sum of their sizes, T] of parts [D, T]."""
        g = self.graph
        whole, start = g.new(sum(part.shape[0] for part in parts), parts[0].shape[1]), 0
        for part in parts:
            g.copy(part, whole.slice0(start, part.shape[0]))
            start += part.shape[0]
        return whole

    def with_row(self, row: Value, n: int, fill: Callable[[Value], Value], *, last: bool = False) -> Value:
        """f32 [D, n + 1] with `row` [D] before n others, or behind them; fill writes these into the view it gets."""
        g, size = self.graph, row.shape[0]
        whole = g.new(size, n + 1)
        g.copy(row.reshape(size, 1), whole.slice(1, n if last else 0, 1))
        fill(whole.slice(1, 0 if last else 1, n))
        return whole

    def merged(self, x: Value, factor: int, *, rows: int | None = None, columns: int | None = None) -> Value:
        """Squares of factor x factor neighbours of x [D, columns * rows] side by side, row by row: f32 [D * factor²,
        n / factor²]."""
        rows, columns = rows or self.rows, columns or self.columns
        size, line = x.shape[0], x.strides[1]
        wide, across, down = size * factor, columns // factor, rows // factor
        source = x.view((wide, factor, across, down), (line * columns, line * factor, line * columns * factor))
        merged = self.graph.new(wide, factor, across, down)
        self.graph.copy(source, merged)
        return merged.reshape(wide * factor, across * down)

    def mean_pooled(self, x: Value, factor: int, *, rows: int | None = None, columns: int | None = None) -> Value:
        """Means of squares of factor x factor neighbours of x [D, columns * rows]: f32 [D, n / factor²]; what is left
        over on the right and below does not count."""
        rows, columns = rows or self.rows, columns or self.columns
        g, size, line = self.graph, x.shape[0], x.strides[1]
        across, down = columns // factor, rows // factor
        steps = line * factor, line * columns * factor
        parts = [
            x.view((size, across, down), steps, line * (i * columns + j)) for i in range(factor) for j in range(factor)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = g.add(total, part)
        return g.scale(total, 1.0 / (factor * factor)).reshape(size, across * down)
