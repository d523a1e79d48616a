"""What all devices share (-sm graph), as nodes: every kind of division in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ikpy.graph.divide_attention import AttentionDivider
from ikpy.graph.divide_networks import NetworkDivider
from ikpy.graph.divide_output import OutputDivider
from ikpy.graph.division import whole_notes
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.placement import Placement
from ikpy.graph.weight_parts import WeightParts


class Divided(NamedTuple):
    """A graph in parts: its nodes, devices of those of parts, and results in parts with their places in the whole."""

    nodes: list[Node]
    devices: dict[Node, str]
    results: list[tuple[Value, Value]]


class Divider:
    """Divides graphs. Parts of weights are made once, whatever number of graphs use them.

    where: has the divisions; runs: whether devices have a kernel for a node.
    """

    def __init__(self, where: Placement, runs: Callable[[Node], bool]) -> None:
        weights = WeightParts()
        self._attention = AttentionDivider(where, runs, weights)
        networks = NetworkDivider(where, runs, weights)
        self._output = OutputDivider(where, runs, weights)
        self._dividers = (self._attention, networks, self._output) if where.divisions else ()

    def settle(self, graphs: Sequence[list[Node]], caches: Mapping[int, Sequence[Buffer]]) -> list[str]:
        """Decides which caches are divided, from graphs that use them; what is said of those that were to be.

        caches: of the layers whose caches are on devices.
        """
        return whole_notes(self._attention.settle(graphs, caches))

    def cache_parts(self, buffer: Buffer) -> list[tuple[str, Buffer]]:
        """The parts of a cache with their devices; none of one that stays whole."""
        return self._attention.cache_parts(buffer)

    def run(self, nodes: list[Node]) -> Divided:
        """The graph with all that is divided in parts."""
        devices: dict[Node, str] = {}
        for divider in self._dividers:
            nodes, made = divider.run(nodes)
            devices |= made
        return Divided(nodes, devices, self._output.logits)
