"""Nodes as a host runs them: by the kernels of its own CPU."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ikpy._native import core
from ikpy.backends.cuda.api import LaunchLike
from ikpy.backends.cuda.state import AddressOf
from ikpy.graph.assign import EXPERT_KINDS
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import Arena

COUNTS = struct.Struct("<III")
"""Tensors, ops and dynamic extents of a program."""
ONE = (1, 1, 1)


@dataclass(eq=False)
class NodeLaunch:
    """A node whose values lie at addresses of the host. runtime: of the run-time scalars."""

    node: Node
    runtime: int
    grid: tuple[int, int, int] = ONE
    block: tuple[int, int, int] = ONE
    shared_bytes: int = 0
    args: Sequence[bytes] = field(default_factory=list)

    @property
    def kernel(self) -> str:
        """Kind of the op."""
        return self.node.kind


@dataclass(eq=False)
class Program:
    """Nodes that the host runs one after the other. number: that the host knows it by, once it was sent."""

    launches: list[NodeLaunch]
    number: int = 0
    kernel: str = "program"
    grid: tuple[int, int, int] = ONE
    block: tuple[int, int, int] = ONE
    shared_bytes: int = 0
    args: Sequence[bytes] = field(default_factory=list)

    @property
    def runtime(self) -> int:
        """Address of the run-time scalars."""
        return self.launches[0].runtime

    def records(self) -> bytes:
        """Tensors, ops and dynamic extents as the host reads them."""
        plan = CompiledPlan(_Records, [launch.node for launch in self.launches], Arena({}, 0), 0)
        counts = COUNTS.pack(len(plan.tensors), len(plan.ops), len(plan.dynamic))
        return b"".join((counts, plan.tensors.tobytes(), plan.ops.tobytes(), plan.dynamic.tobytes()))


class _Records:
    """Stands for the native module where records are made and not run."""

    op_kinds = staticmethod(core.op_kinds)

    @staticmethod
    def Plan(*_: Any) -> None:
        """Nothing."""


class RemoteKernels:
    """The CPU kernels of a host. activation_format (weight type, rows, by expert), activation_nbytes: what the host's
    kernels read, which another machine may choose otherwise."""

    def __init__(
        self, activation_format: Callable[[int, int, bool], int], activation_nbytes: Callable[[tuple[int, ...]], int]
    ) -> None:
        self._format, self._nbytes = activation_format, activation_nbytes

    def supports(self, node: Node) -> str | None:
        """Why a node must run on this machine, or None."""
        values = (node.dst, *node.src)
        here = any(v is not None and v.buffer.role == "host" for v in values)
        return "it uses memory of this machine" if here else None

    def lower(self, node: Node, address: AddressOf, runtime: int, scratch: int) -> list[LaunchLike]:
        """The node at the host's addresses."""
        moved: dict[int, Value] = {}

        def there(value: Value | None) -> Value | None:
            if value is None:
                return None
            if id(value) not in moved:
                # An address of 0 says that memory is to be planned: there is none.
                buffer = Buffer(value.buffer.nbytes, address(value))
                moved[id(value)] = Value(buffer, value.type_id, value.shape, value.strides, 0, value.dynamic_dim)
            return moved[id(value)]

        dst = there(node.dst)
        assert dst is not None
        copy = Node(node.kind, dst, [there(v) for v in node.src], node.ip, node.fp, [], node.cells)
        return [NodeLaunch(copy, runtime)]

    def joined(self, first: Node, second: Node) -> Node | None:
        """Nothing is joined."""
        return None

    def merged(self, launches: Iterable[LaunchLike]) -> list[LaunchLike]:
        """All of them as one program, which is sent once."""
        nodes = [launch for launch in launches if isinstance(launch, NodeLaunch)]
        return [Program(nodes)] if nodes else []

    def scratch_bytes(self, node: Node) -> int:
        """The host has work memory of its own."""
        return 0

    def activation_format(self, node: Node) -> int:
        """Format that the host's kernels read for so many rows."""
        weight = node.src[0]
        assert weight is not None
        if node.kind in EXPERT_KINDS:
            n_tokens, n_used, n_expert = node.ip[1], node.ip[3], node.ip[4]
            return self._format(weight.type_id, min(n_used * n_tokens // n_expert, n_tokens // 2), True)
        n_rows = node.ip[1] or node.dst.shape[1]
        return self._format(weight.type_id, n_rows, False)

    def prepared_nbytes(self, node: Node) -> int:
        """Bytes of the activations that an act_prepare node makes there."""
        x = node.src[0]
        assert x is not None
        return self._nbytes((node.ip[0], x.shape[0], x.shape[1], x.shape[2] * x.shape[3]))


def first_number(data: np.ndarray, kind: str) -> int:
    """The first number of an answer."""
    return int(data.view(kind)[0])
