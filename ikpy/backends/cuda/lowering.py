"""The CUDA kernels as the plans use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from ikpy._native import core
from ikpy.backends.cuda import launch
from ikpy.backends.cuda.api import LaunchLike
from ikpy.backends.cuda.state import AddressOf
from ikpy.graph.ir import Node, Value


class CudaKernels:
    """Lowers nodes to launches of the kernels in kernels/*.cu, which all devices of these capabilities can run.

    large: how large products are computed, by kernel file (``launch.Target``); None: on bf16 tensor cores.
    """

    def __init__(
        self, capabilities: Sequence[tuple[int, int]], large: Mapping[str, launch.Large] | None = None
    ) -> None:
        default = {"": launch.Large(launch.BF16_TOKENS)}
        self._target = launch.Target.of(capabilities, default if large is None else large)

    def supports(self, node: Node) -> str | None:
        """Why a node must run on the CPU, or None."""
        return launch.supports(node)

    def lower(self, node: Node, address: AddressOf, runtime: int, scratch: int) -> list[LaunchLike]:
        """Launches of a node; runtime and scratch are addresses of the scalars and of work memory."""

        def resolve(value: Value) -> int:
            if value is launch.RUNTIME:
                return runtime
            return scratch if value is launch.WORK else address(value)

        return list(launch.lower(node, resolve, self._target))

    def joined(self, first: Node, second: Node) -> Node | None:
        """One node for two that follow each other on a device, or None."""
        return launch.joined(first, second)

    def merged(self, launches: Iterable[LaunchLike]) -> list[LaunchLike]:
        """What does the same as these launches, one after the other."""
        return list(launch.merged(cast("Iterable[launch.Launch]", launches)))

    def scratch_bytes(self, node: Node) -> int:
        """Work memory that the launches of a node need."""
        return launch.work_bytes(node, self._target)

    def activation_format(self, node: Node) -> int:
        """That of single rows, as whole batches depend on the CPU; bf16 for large products on bf16 tensor cores."""
        large = launch.large_format(node, self._target)
        if large is not None:
            return large
        weight = node.src[0]
        assert weight is not None
        return core.activation_format(weight.type_id, 1)

    def prepared_nbytes(self, node: Node) -> int:
        """Bytes of the activations that an act_prepare node makes, as on the CPU but for tiles."""
        x = node.src[0]
        assert x is not None
        if node.ip[0] == launch.ACT_TILES:
            return launch.tiled_bytes(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])
        return core.activation_nbytes(node.ip[0], x.shape[0], x.shape[1], x.shape[2] * x.shape[3])
