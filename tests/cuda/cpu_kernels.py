"""A double of the CUDA kernels: nodes run on emulated device memory by the CPU's kernels.

Placement, splits, copies and waits are the real ones, and results must equal those of the CPU to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ikpy._native import core
from ikpy.backends.cuda.api import LaunchLike
from ikpy.backends.cuda.state import AddressOf
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import Arena


@dataclass
class NodeLaunch:
    """A node with the addresses its values have on the device."""

    node: Node
    plan: CompiledPlan
    runtime: int
    kernel: str
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    args: list[bytes] = field(default_factory=list)


class CpuKernels:
    """unsupported: why a node cannot run on a device, for tests of that path."""

    def __init__(self, unsupported: Callable[[Node], str | None] = lambda node: None) -> None:
        self.supports = unsupported
        self.launched: list[Node] = []

    def lower(self, node: Node, address: AddressOf, runtime: int, scratch: int) -> list[LaunchLike]:
        moved: dict[int, Value] = {}

        def on_device(value: Value | None) -> Value | None:
            if value is None:
                return None
            if id(value) not in moved:
                buffer = Buffer(value.buffer.nbytes, address(value) - value.offset, None)
                moved[id(value)] = Value(
                    buffer, value.type_id, value.shape, value.strides, value.offset, value.dynamic_dim
                )
            return moved[id(value)]

        dst = on_device(node.dst)
        assert dst is not None
        copy = Node(node.kind, dst, [on_device(v) for v in node.src], node.ip, node.fp)
        return [NodeLaunch(node, CompiledPlan(core, [copy], Arena({}, 0), 0), runtime, node.kind)]

    def merged(self, launches: Iterable[LaunchLike]) -> list[LaunchLike]:
        return list(launches)

    def joined(self, first: Node, second: Node) -> Node | None:
        return None

    def scratch_bytes(self, node: Node) -> int:
        return 64

    def activation_format(self, node: Node) -> int:
        return node.ip[0]

    def prepared_nbytes(self, node: Node) -> int:
        x = node.src[0]
        assert x is not None
        return core.activation_nbytes(node.ip[0], x.shape[0], x.shape[1], x.shape[2] * x.shape[3])

    def launch(self, launch: Any) -> None:
        """What an emulated device calls."""
        self.launched.append(launch.node)
        n_kv = int(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 1).from_address(launch.runtime))[0])
        launch.plan.run(n_kv, 1)
