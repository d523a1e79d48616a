"""Work memory of a graph for every number of tokens, from the nodes for one.

How attention shares its work among threads depends on the number of tokens by steps, so that fewer tokens may need more
memory; all other ops need no more for fewer tokens than for the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ikpy.graph.ir import PLANNED_ADDRESS, Node
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import Arena


def work_bytes(core: Any, nodes: Sequence[Node], arena: Arena, counts: range, n_threads: int) -> int:
    """Bytes that hold the work memory of the nodes as they are, and with any of these numbers of tokens."""
    if not nodes:
        return 0
    plan = CompiledPlan(core, list(nodes), arena, PLANNED_ADDRESS)
    different = list(_different_attention(nodes).values())
    if not different or not counts:
        return plan.work_bytes(n_threads)
    tensors, ops = _with_tokens(plan.tensors, plan.ops[different], counts)
    return core.Plan(tensors, np.concatenate([plan.ops, ops]), plan.dynamic).work_bytes(n_threads)


def _different_attention(nodes: Sequence[Node]) -> dict[tuple, int]:
    """An index of an attention op for all that differ in nothing but their memory."""
    different: dict[tuple, int] = {}
    for i, node in enumerate(nodes):
        if node.kind == "attention":
            shapes = [(v.type_id, v.shape, v.strides) for v in node.src if v is not None]
            different.setdefault((*shapes, *node.ip), i)
    return different


def _with_tokens(tensors: np.ndarray, ops: np.ndarray, counts: range) -> tuple[np.ndarray, np.ndarray]:
    """The ops on the first tokens, for each of the counts, and the tensors followed by their queries and results."""
    variants = np.repeat(ops, len(counts))
    first = np.concatenate([tensors[variants["src"][:, 0]], tensors[variants["dst"]]])
    first["ne"][:, 2] = np.resize(counts, len(first))
    variants["src"][:, 0] = len(tensors) + np.arange(len(variants))
    variants["dst"] = variants["src"][:, 0] + len(variants)
    return np.concatenate([tensors, first]), variants
