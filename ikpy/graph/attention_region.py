"""What a graph has of the attention of one layer, from the projections of queries to that of the output (-sm graph)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from ikpy.graph.division import ATTENTION_OUTPUT, Division, Part, attention_tensor
from ikpy.graph.head_parts import HeadParts
from ikpy.graph.ir import Buffer, Node

NEEDS_ALL = "needs all heads together"


class Region(ABC):
    """The nodes of a layer's attention in order. caches: of the layer; division: of its output projection.

    reason: why it stays whole, if it does.
    """

    def __init__(self, caches: set[Buffer], division: Division) -> None:
        self.caches = caches
        self.division = division
        self.nodes: list[Node] = []
        self.reason = ""

    def add(self, node: Node) -> None:
        """Takes a node that reads or writes values of the region."""
        self.nodes.append(node)
        if not self.reason and not self._fits(node):
            self.reason = f"{node.kind} {NEEDS_ALL}"

    def is_end(self, node: Node) -> bool:
        """Whether a node is the output projection."""
        weight = node.src[0] if node.kind == "mul_mat" else None
        return weight is not None and attention_tensor(weight.buffer.name)[1] == ATTENTION_OUTPUT

    @property
    def first(self) -> Node:
        """The node in front of which the earlier ones are done."""
        return self.nodes[0]

    @abstractmethod
    def _fits(self, node: Node) -> bool:
        """Whether parts of the heads can go through a node; what it makes belongs to the region from then on."""

    @abstractmethod
    def part(self, parts: HeadParts, part: Part) -> Callable[[Node], Node | None]:
        """What turns nodes, in order, into those of a part; None where a node has no heads of the part."""
