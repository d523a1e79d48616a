"""Graphs over one picture: built once for every size, run on the CPU."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ikpy._native import core
from ikpy.errors import ResourceError
from ikpy.graph.builder import Graph
from ikpy.graph.fusion import eliminate_dead
from ikpy.graph.ir import F16, I32, Value, external
from ikpy.graph.plan import CompiledPlan, aligned_bytes
from ikpy.graph.planner import plan_arena
from ikpy.machine_memory import check_memory
from ikpy.vision.weights import Bounds, Linear, Mlp, Norm, value_of

MAX_PLANS = 8
"""Sizes of pictures whose plans are kept at most."""
MAX_PLAN_BYTES = 1 << 28
"""Of their patches and constants together, but for those of the last one: tables of positions of large pictures."""

MAX_PATCHES = 1 << 18
"""Of a picture: each sees all others. More than any family wants by itself."""


class PictureGraph:
    """A graph, what it is built over, and the compound operations of encoders.

    patches: f32 [elements of a patch, n], the picture; rows, columns: n patches in that many. Arrays that depend on the
    size alone (tables of positions, indices) are constants of the graph.
    """

    def __init__(self, patches: NDArray[np.float32], rows: int, columns: int) -> None:
        self.graph = Graph(core)
        self.rows = rows
        self.columns = columns
        self.patches = value_of(patches)
        self.n_bytes = patches.nbytes
        """Of the patches and all constants."""

    @property
    def n_patches(self) -> int:
        """All of them."""
        return self.rows * self.columns

    def floats(self, array: NDArray[np.floating]) -> Value:
        """A constant float32 array."""
        self.n_bytes += 4 * array.size
        return value_of(np.asarray(array, np.float32))

    def indices(self, array: NDArray[np.integer]) -> Value:
        """A constant i32 array, as for `Graph.get_rows` and rotation positions."""
        array = np.ascontiguousarray(array, np.int32)
        self.n_bytes += array.nbytes
        return external(array.ctypes.data, array, I32, array.shape[::-1])

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
        n = k.shape[2]
        if ranges is None:
            ranges = np.tile(np.array([[0, n]]), (q.shape[2], 1))
        open_row = np.zeros(n, np.float16)  # nothing is hidden: one row stands for all
        mask = external(open_row.ctypes.data, open_row, F16, (n,)).view((n, q.shape[2]), (0,))
        out = self.graph.attention(
            q, [k], v, (mask, self.indices(ranges)), scale=scale, flash=True, sinks=sinks, softcap=softcap
        )
        return out.reshape(out.shape[0] * out.shape[1], out.shape[2])

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

    def mean_pooled(self, x: Value, factor: int) -> Value:
        """Means of squares of factor x factor neighbours of x [D, columns * rows]: f32 [D, n / factor²]; what is left
        over on the right and below does not count."""
        g, size, line = self.graph, x.shape[0], x.strides[1]
        across, down = self.columns // factor, self.rows // factor
        steps = line * factor, line * self.columns * factor
        parts = [
            x.view((size, across, down), steps, line * (i * self.columns + j))
            for i in range(factor)
            for j in range(factor)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = g.add(total, part)
        return g.scale(total, 1.0 / (factor * factor)).reshape(size, across * down)


class PicturePlan:
    """A compiled graph of pictures of one size."""

    def __init__(self, build: Callable[[PictureGraph], Value], n_elements: int, rows: int, columns: int) -> None:
        self.patches = np.zeros((rows * columns, n_elements), np.float32)
        b = PictureGraph(self.patches, rows, columns)
        result = build(b)
        self._result = result if result.is_contiguous else b.graph.copy(result, b.graph.new(*result.shape))
        self._nodes = eliminate_dead(b.graph.nodes, {self._result.buffer})
        self.arena = plan_arena(self._nodes, {self._result.buffer})
        self.n_bytes = b.n_bytes
        self._compiled: CompiledPlan | None = None

    def bind(self, memory: NDArray[np.uint8]) -> None:
        """Compiles it for an arena."""
        self._compiled = CompiledPlan(core, self._nodes, self.arena, memory.ctypes.data)
        start = self.arena.offsets[self._result.buffer] + self._result.offset
        n, rows = self._result.shape[:2]
        self.rows = memory[start : start + 4 * n * rows].view(np.float32).reshape(rows, n)

    def run(self, n_threads: int) -> None:
        """Evaluates the picture in `patches`."""
        assert self._compiled is not None
        self._compiled.run(1, n_threads)


class PicturePlans:
    """Plans by size, the last few kept, over one arena; threads take turns.

    build: makes the graph of a picture, its result being f32 [n, rows]. n_elements: of a patch.
    """

    def __init__(self, build: Callable[[PictureGraph], Value], n_elements: int, n_threads: int) -> None:
        self._build = build
        self._n_elements = n_elements
        self._n_threads = n_threads
        self._plans: OrderedDict[tuple[int, int], PicturePlan] = OrderedDict()
        self._arena = aligned_bytes(0)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def n_bytes(self) -> int:
        """Bytes of what the plans hold beside the arena."""
        return sum(plan.n_bytes for plan in self._plans.values())

    def run(self, patches: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
        """The result [rows, n] for the patches of a picture [rows * columns, n_elements]."""
        with self._lock:
            plan = self._plan(rows, columns)
            plan.patches[:] = patches
            plan.run(self._n_threads)
            return plan.rows.copy()

    def _plan(self, rows: int, columns: int) -> PicturePlan:
        size = rows, columns
        if size not in self._plans:
            if rows * columns > MAX_PATCHES:
                raise ResourceError(f"a picture of {columns} x {rows} patches; at most {MAX_PATCHES} are possible")
            plan = PicturePlan(self._build, self._n_elements, rows, columns)
            if plan.arena.nbytes > self._arena.nbytes:
                check_memory(plan.arena.nbytes, f"a picture of {columns} x {rows} patches takes", "use a smaller one")
                self._plans.clear()
                self._arena = aligned_bytes(plan.arena.nbytes)
            plan.bind(self._arena)
            self._plans[size] = plan
            while len(self._plans) > 1 and (len(self._plans) > MAX_PLANS or self.n_bytes > MAX_PLAN_BYTES):
                self._plans.popitem(last=False)
        self._plans.move_to_end(size)
        return self._plans[size]
