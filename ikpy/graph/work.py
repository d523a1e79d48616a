"""Work memory of a graph for every number of tokens, from the nodes for one.

How attention shares its work among threads depends on the number of tokens by steps, so that fewer tokens may need more
memory; all other ops need no more for fewer tokens than for the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ikpy.graph.ir import PLANNED_ADDRESS, Node, Value
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import Arena


def work_bytes(core: Any, nodes: Sequence[Node], arena: Arena, counts: range, n_threads: int) -> int:
    """Bytes that hold the work memory of the nodes as they are, and with any of these numbers of tokens."""
    different: dict[tuple, Node] = {}
    for node in nodes:
        if node.kind == "attention":
            shapes = [(v.type_id, v.shape, v.strides) for v in node.src if v is not None]
            different.setdefault((*shapes, *node.ip), node)
    variants = [_with_tokens(node, n) for node in different.values() for n in counts]
    if not nodes:
        return 0
    return CompiledPlan(core, [*nodes, *variants], arena, PLANNED_ADDRESS).work_bytes(n_threads)


def _with_tokens(node: Node, n: int) -> Node:
    """The op on the first n tokens."""
    q = node.src[0]
    assert q is not None
    return replace(node, dst=_first(node.dst, n), src=[_first(q, n), *node.src[1:]])


def _first(value: Value, n: int) -> Value:
    shape = (*value.shape[:2], n, value.shape[3])
    return replace(value, shape=shape)
