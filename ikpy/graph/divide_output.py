"""The output matrix that all devices share (-sm graph), as nodes: parts of the logits, put together in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ikpy.graph.division import OUTPUTS, Part
from ikpy.graph.ir import Node, Value, like
from ikpy.graph.placement import Placement
from ikpy.graph.weight_parts import WeightParts, is_contiguous

# Ops on single logits, which devices do on their parts.
ELEMENTWISE = ("softcap", "scale")


class OutputDivider:
    """Divides the last product by rows; the parameters are those of `Divider`.

    The logits stay whole if anything but an op on single ones reads them, as adapters do.
    """

    def __init__(self, where: Placement, runs: Callable[[Node], bool], weights: WeightParts) -> None:
        self._division = next((where.divisions[name] for name in OUTPUTS if name in where.divisions), None)
        self._runs = runs
        self._weights = weights
        self.logits: list[tuple[Value, Value]] = []
        """Parts of the logits of the graph that was divided last, and their places in all of them."""

    def run(self, nodes: list[Node]) -> tuple[list[Node], dict[Node, str]]:
        """The nodes with the product in parts, and the devices of the new ones. Sets `logits`."""
        self.logits = []
        product = next((node for node in reversed(nodes) if self._is_divided(node)), None)
        if product is None or self._division is None:
            return nodes, {}
        chain = [product]
        while readers := [n for n in nodes if any(v and v.buffer is chain[-1].dst.buffer for v in n.src)]:
            if len(readers) > 1 or readers[0].kind not in ELEMENTWISE:
                return nodes, {}
            chain.append(readers[0])
        parts = {part: self._part(chain, part) for part in self._division.parts}
        devices = {node: part.device for part, made in parts.items() for node in made}
        if not all(map(self._runs, devices)):
            return nodes, {}
        logits = chain[-1].dst
        self.logits = [(made[-1].dst, logits.slice0(part.start, part.length)) for part, made in parts.items()]
        replaced = {node: list(devices) if node is product else [] for node in chain}
        return [n for node in nodes for n in replaced.get(node, [node])], devices

    def _is_divided(self, node: Node) -> bool:
        weight = node.src[0] if node.kind == "mul_mat" else None
        if weight is None or self._division is None:
            return False
        return weight.buffer.name in OUTPUTS and weight.shape[1] == self._division.extent and is_contiguous(weight)

    def _part(self, chain: list[Node], part: Part) -> list[Node]:
        product, *rest = chain
        weight, x, bias = product.src
        value = like(product.dst, part.length, *product.dst.shape[1:])
        src = [self._weights.rows(weight, part), x, self._weights.bias(bias, part)]
        made = [replace(product, dst=value, src=src)]
        for node in rest:
            made.append(replace(node, dst=like(value), src=[made[-1].dst]))
        return made
