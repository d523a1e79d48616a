"""Peephole fusion over the node list. It never changes a formula, only saves passes over memory."""

from __future__ import annotations

from ikpy.graph.ir import Buffer, Node


def fuse(nodes: list[Node]) -> list[Node]:
    """Residual add directly followed by the RMS norm of its result becomes one op that writes both."""
    fused: list[Node] = []
    for node in nodes:
        previous = fused[-1] if fused else None
        if previous is not None and _is_add_norm(previous, node):
            total = previous.dst
            fused[-1] = Node(
                "rms_norm",
                node.dst,
                [previous.src[0], node.src[1], previous.src[1], total],
                [],
                node.fp,
                [total],
            )
        else:
            fused.append(node)
    return fused


def _is_add_norm(add: Node, norm: Node) -> bool:
    if add.kind != "add" or norm.kind != "rms_norm" or norm.src[0] is not add.dst or norm.src[2] is not None:
        return False
    a, b = add.src[0], add.src[1]
    return a is not None and b is not None and a.shape == b.shape


def eliminate_dead(nodes: list[Node], results: set[Buffer]) -> list[Node]:
    """Drops nodes whose output nobody reads: such that neither feed a result nor write outside the arena."""
    needed = set(results)
    kept: list[Node] = []
    for node in reversed(nodes):
        written = [node.dst, *node.writes]
        if any(v.buffer.address is not None or v.buffer in needed for v in written):
            kept.append(node)
            needed.update(v.buffer for v in node.src if v is not None)
            needed.update(v.buffer for v in written)
    return kept[::-1]
