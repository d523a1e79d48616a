"""Feed-forward networks that all devices share (-sm graph), as nodes: parts of the products and the sums of them.

A network is divided where its nodes are the fused up and gate, the preparation of the hidden values and `down` (with
experts also their weighted sum), and nothing else reads what lies between: adapters and statistics leave it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ikpy.graph.division import Part
from ikpy.graph.ir import Buffer, Node, Value, like
from ikpy.graph.placement import Placement
from ikpy.graph.weight_parts import WeightParts, is_contiguous

UP_GATE = {"mul_mat_up_gate": "mul_mat", "mul_mat_id_up_gate": "mul_mat_id"}
"""Fused up and gate, and the product that `down` is then."""


class Network(NamedTuple):
    """Nodes of a feed-forward network; combine: of routed experts."""

    up_gate: Node
    prepare: Node
    down: Node
    combine: Node | None
    parts: tuple[Part, ...]

    @property
    def last(self) -> Node:
        """The node that writes the result."""
        return self.combine or self.down


class _Pieces(NamedTuple):
    """Nodes of the parts of a network with their devices, the part of the result on each, and the sums of these."""

    made: dict[Node, str]
    results: dict[str, Value]
    sums: dict[Node, str]

    @property
    def nodes(self) -> dict[Node, str]:
        """All nodes."""
        return self.made | self.sums


class NetworkDivider:
    """Divides the networks of graphs; the parameters are those of `Divider`."""

    def __init__(self, where: Placement, runs: Callable[[Node], bool], weights: WeightParts) -> None:
        self._divisions = where.divisions
        self._layer_device = where.layer_device
        self._runs = runs
        self._weights = weights

    def run(self, nodes: list[Node]) -> tuple[list[Node], dict[Node, str]]:
        """The nodes with networks in parts, and the devices of the new ones."""
        readers: dict[Buffer, list[Node]] = {}
        for node in nodes:
            for value in node.src:
                if value is not None:
                    readers.setdefault(value.buffer, []).append(node)
        found = [self._network(node, readers) for node in nodes if node.kind in UP_GATE]
        networks = [network for network in found if network is not None]
        done: dict[Buffer, _Pieces] = {}
        replaced: dict[Node, list[Node]] = {}
        # Shared experts first: where routed ones are divided too, each device adds its parts of both.
        for network in sorted(networks, key=lambda network: network.combine is not None):
            addend = network.combine.src[3] if network.combine else None
            shared = done.get(addend.buffer) if addend and len(readers[addend.buffer]) == 1 else None
            pieces = self._divided(network, shared.results if shared else {})
            if all(self._runs(n) for n in pieces.nodes if n.kind != "act_prepare"):
                done[network.last.dst.buffer] = pieces
                if shared:
                    shared.sums.clear()
                replaced |= {n: [] for n in network[:4] if n is not None}
        devices: dict[Node, str] = {}
        for network in networks:
            made = done.get(network.last.dst.buffer)
            if made:
                replaced[network.last] = list(made.nodes)
                devices |= {n: d for n, d in made.nodes.items() if n.kind != "act_prepare"}
        return [n for node in nodes for n in replaced.get(node, [node])], devices

    def _network(self, node: Node, readers: Mapping[Buffer, list[Node]]) -> Network | None:
        """The network that starts with a fused up and gate, if it can be divided."""
        up, gate = node.src[0], node.src[1]
        assert up is not None and gate is not None
        division = self._divisions.get(up.buffer.name)
        if division is None or self._divisions.get(gate.buffer.name) != division or up.shape[1] != division.extent:
            return None
        prepare = _only(readers, node, "act_prepare")
        down = _only(readers, prepare, UP_GATE[node.kind])
        weight = down.src[0] if down else None
        if prepare is None or down is None or weight is None or weight.buffer.name not in self._divisions:
            return None
        if not all(is_contiguous(w) for w in (up, gate, weight)) or down.src[1] is not prepare.dst:
            return None
        combine = _only(readers, down, "moe_combine") if down.kind == "mul_mat_id" else None
        if down.kind == "mul_mat_id" and (combine is None or combine.src[0] is not down.dst):
            return None
        return Network(node, prepare, down, combine, division.parts)

    # parts

    def _divided(self, network: Network, shared: Mapping[str, Value]) -> _Pieces:
        """All nodes of the parts, and the sums of their results. shared: to be added, by the device that has it."""
        weight = network.up_gate.src[0]
        assert weight is not None
        own = self._layer_device(weight.buffer.name)
        made: dict[Node, str] = {}
        results = dict(shared)
        for i, part in enumerate(network.parts):
            nodes = self._part(network, part, shared.get(part.device), with_bias=i == 0)
            made |= dict.fromkeys(nodes, part.device)
            results[part.device] = nodes[-1].dst
        # The own part first: those of other devices arrive while it is made.
        terms = [v for d, v in sorted(results.items(), key=lambda item: item[0] != own)]
        if network.combine is not None and network.combine.src[3] is not None and not shared:
            terms.insert(0, network.combine.src[3])
        sums: dict[Node, str] = {}
        total = terms[0]
        for value in terms[1:]:
            dst = network.last.dst if value is terms[-1] else like(network.last.dst)
            sums[Node("add", dst, [total, value])] = own
            total = dst
        return _Pieces(made, results, sums)

    def _part(self, network: Network, part: Part, addend: Value | None, *, with_bias: bool) -> list[Node]:
        up_gate, prepare, down, combine, _ = network
        hidden = like(up_gate.dst, part.length, *up_gate.dst.shape[1:])
        source = prepare.src[0]
        assert source is not None
        rows = hidden.reshape(part.length, *source.shape[1:])
        prepared, product = like(prepare.dst), like(down.dst)
        weights = [self._weights.rows(v, part) for v in up_gate.src[:2]]
        biases = [self._weights.bias(v, part) for v in up_gate.src[-2:]]
        weight, bias = self._weights.columns(down.src[0], part), down.src[-1] if with_bias else None
        nodes = [
            replace(up_gate, dst=hidden, src=[*weights, *up_gate.src[2:-2], *biases]),
            replace(prepare, dst=prepared, src=[rows, *prepare.src[1:]]),
            replace(down, dst=product, src=[weight, prepared, *down.src[2:-1], bias]),
        ]
        if combine is not None:
            nodes.append(replace(combine, dst=like(combine.dst), src=[product, *combine.src[1:3], addend]))
        return nodes


def _only(readers: Mapping[Buffer, list[Node]], node: Node | None, kind: str) -> Node | None:
    """The node of a kind that alone reads what a node makes."""
    found = readers.get(node.dst.buffer, []) if node else []
    return found[0] if len(found) == 1 and found[0].kind == kind else None
