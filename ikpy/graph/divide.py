"""What all devices share (-sm graph), as nodes: every kind of division in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ikpy.graph.divide_networks import NetworkDivider
from ikpy.graph.divide_output import OutputDivider
from ikpy.graph.division import Division
from ikpy.graph.ir import Node
from ikpy.graph.weight_parts import WeightParts


class Divider:
    """Divides graphs. Parts of weights are made once, whatever number of graphs use them.

    divisions: by tensor name; layer_device: device that a tensor's layer is on; runs: whether devices have a kernel for
    a node.
    """

    def __init__(
        self,
        divisions: Mapping[str, Division],
        layer_device: Callable[[str], str],
        runs: Callable[[Node], bool],
    ) -> None:
        weights = WeightParts()
        self._dividers = (
            (NetworkDivider(divisions, layer_device, runs, weights), OutputDivider(divisions, runs, weights))
            if divisions
            else ()
        )

    def run(self, nodes: list[Node]) -> tuple[list[Node], dict[Node, str]]:
        """The nodes with all that is divided in parts, and the devices of the new ones."""
        devices: dict[Node, str] = {}
        for divider in self._dividers:
            nodes, made = divider.run(nodes)
            devices |= made
        return nodes, devices
