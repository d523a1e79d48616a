"""Native records of a plan and the compiled plan itself."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from ikpy.graph.ir import Node, Value
from ikpy.graph.planner import Arena

T = TypeVar("T", int, float)
MAX_SOURCES = 11
MAX_INT_PARAMS = 16
MAX_FLOAT_PARAMS = 12

# Mirrors ikpy::Tensor and ikpy::Op (ikpy/_native/include/ikpy/tensor.hpp).
TENSOR_DTYPE = np.dtype(
    [("data", "u8"), ("type", "i4"), ("unused", "i4"), ("ne", "i8", 4), ("nb", "i8", 4)], align=True
)
OP_DTYPE = np.dtype(
    [
        ("kind", "i4"),
        ("dst", "i4"),
        ("src", "i4", MAX_SOURCES),
        ("ip", "i4", MAX_INT_PARAMS),
        ("fp", "f4", MAX_FLOAT_PARAMS),
        ("above", "i4"),
        ("upto", "i4"),
    ],
    align=True,
)


def aligned_bytes(n: int) -> np.ndarray:
    """Zeroed uint8 [n] whose address is a multiple of 64."""
    memory = np.zeros(n + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + n]


def _padded(rows: list[list[T]], n: int, fill: T) -> list[list[T]]:
    """Rows of n entries."""
    return [row + [fill] * (n - len(row)) for row in rows]


class CompiledPlan:
    """Native records of a graph: tensors and ops bound to an arena, ready to run.

    reader: core.ExpertReader that the expert groups of the nodes are numbered for.
    """

    def __init__(
        self,
        core: Any,
        nodes: list[Node],
        arena: Arena,
        arena_address: int,
        reader: Any = None,
    ) -> None:
        self._core = core
        self._keep_alive = [v.buffer.owner for n in nodes for v in (n.dst, *n.src) if v is not None]
        self._index: dict[tuple, int] = {}
        self._rows: list[tuple] = []
        self._dynamic: list[tuple[int, int]] = []
        self._arena, self._base = arena, arena_address
        self.kinds = [node.kind for node in nodes]
        numbers = core.op_kinds()
        ops = np.zeros(len(nodes), OP_DTYPE)
        # Column by column: assigning to single records takes ten times as long.
        ops["kind"] = [numbers[kind] for kind in self.kinds]
        ops["dst"] = [self._tensor(node.dst) for node in nodes]
        sources = [[-1 if value is None else self._tensor(value) for value in node.src] for node in nodes]
        ops["src"] = _padded(sources, MAX_SOURCES, -1)
        ops["ip"] = _padded([node.ip for node in nodes], MAX_INT_PARAMS, 0)
        ops["fp"] = _padded([node.fp for node in nodes], MAX_FLOAT_PARAMS, 0)
        ops["above"] = [node.cells.above for node in nodes]
        ops["upto"] = [node.cells.upto for node in nodes]
        self.tensors = np.array(self._rows, TENSOR_DTYPE)
        self.ops = ops
        self.dynamic = np.array(self._dynamic, np.int32).reshape(-1, 2)
        self.native = core.Plan(self.tensors, self.ops, self.dynamic, reader)

    def _tensor(self, value: Value) -> int:
        base = value.buffer.address
        if base is None:
            base = self._base + self._arena.offsets[value.buffer]
        key = (base + value.offset, value.type_id, value.shape, value.strides, value.dynamic_dim)
        if key not in self._index:
            self._index[key] = len(self._rows)
            if value.dynamic_dim is not None:
                self._dynamic.append((len(self._rows), value.dynamic_dim))
            self._rows.append((key[0], value.type_id, 0, value.shape, value.strides))
        return self._index[key]

    def use_thread_set(self, number: int) -> None:
        """Runs on the threads that core.set_thread_set places under this number; 0 unless told."""
        self.native.use_thread_set(number)

    def work_bytes(self, n_threads: int) -> int:
        """Bytes of kernel work memory for n_threads."""
        return self.native.work_bytes(n_threads)

    def run(self, n_kv: int, n_threads: int, work: Any = None, first: int = 0, last: int = -1) -> None:
        """Executes ops first .. last-1 (all by default); n_kv is the number of attended cells (padded).

        work: core.WorkMemory of work_bytes(n_threads) or more that plans share; None: memory of its own.
        """
        self.native.run(n_kv, n_threads, work, first, last)

    @property
    def seconds(self) -> float:
        """Time of the last run in threads and kernels."""
        return self.native.seconds

    def profile(self, n_kv: int, n_threads: int) -> list[tuple[str, float]]:
        """Runs once with timing; (op kind, seconds) per op."""
        return list(zip(self.kinds, self.native.profile(n_kv, n_threads).tolist(), strict=True))
