"""Graphs of single ops over arrays, run by the CPU backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ikpy._native import core
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F32, I32, I64, Value, external
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import plan_arena

TYPES = {"float32": F32, "int32": I32, "int64": I64}


def value_of(array: np.ndarray) -> Value:
    """A value over the array itself, which may be a view whose last axis is contiguous."""
    whole = array if array.flags.c_contiguous or array.base is None else array.base
    assert isinstance(whole, np.ndarray)
    value = external(whole.ctypes.data, whole, TYPES[array.dtype.name], (whole.size,))
    return value.view(array.shape[::-1], array.strides[-2::-1], array.ctypes.data - whole.ctypes.data)


def run_graph(make: Callable[[Graph], Sequence[Value]], n_threads: int) -> list[np.ndarray]:
    """The results, 4-dimensional with the last axis first in ggml order, in memory that was NaN."""
    graph = Graph(core)
    values = make(graph)
    arena = plan_arena(graph.nodes, {value.buffer for value in values})
    memory = np.full(arena.nbytes + 64, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64
    CompiledPlan(core, graph.nodes, arena, memory.ctypes.data + start).run(0, n_threads)
    found = []
    for value in values:
        data = memory[start + arena.offsets[value.buffer] :][: 4 * value.n_elements]
        found.append(data.view(np.int32 if value.type_id == I32 else np.float32).reshape(value.shape[::-1]))
    return found


def assert_close(what: str, found: np.ndarray, expected: np.ndarray, names: Sequence[str], bound: float) -> None:
    """Errors relative to the largest element along the last axis, or 0.01 of the largest of all; names: of the axes."""
    scale = np.maximum(np.abs(expected).max(-1, keepdims=True), max(0.01 * np.abs(expected).max(), 1e-30))
    error = np.nan_to_num(np.abs(found - expected) / scale, nan=np.inf)
    worst = np.unravel_index(error.argmax(), error.shape)
    place = ", ".join(f"{name} {i}" for name, i in zip(names, worst, strict=True))
    assert error[worst] <= bound, f"{what}: {place}: {found[worst]} instead of {expected[worst]}: {error[worst]:.1e}"
