"""Finds where values stop being numbers: the first op of a micro-batch that makes a NaN or an overflow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ikpy.backends.cuda.check import (
    FLOATS,
    PREPARES,
    ROUTES,
    SKIPPED,
    LeftOut,
    describe,
    left_out_of,
    strided,
    written_part,
)
from ikpy.engine.plans import BuiltGraph
from ikpy.graph.assign import Step, written
from ikpy.graph.ir import Value
from ikpy.graph.placement import CPU


def first_not_a_number(built: BuiltGraph, memory: np.ndarray, n_kv: int, run_op: Callable[[int], None]) -> str:
    """Runs the ops of a graph one after the other; op and weights of the first with a NaN or +infinity, "" if none has.

    memory: uint8, the arena that the ops write; run_op: runs the op of an index. -infinity marks what is left out.
    """
    left_out: LeftOut = None
    for i, node in enumerate(built.cpu_nodes):
        if node.dst.buffer.role == "host":
            continue  # statistics, in which these tokens are counted already
        run_op(i)
        if node.kind == ROUTES:
            left_out = left_out_of(node.dst, _bytes(built, memory, node.dst))
        values = [] if node.kind in SKIPPED else written(node)
        for value in values[:-1] if node.kind == PREPARES else values:
            if _is_bad(built, memory, value, n_kv, left_out):
                return describe(Step(CPU, node))
    return ""


def _bytes(built: BuiltGraph, memory: np.ndarray, value: Value) -> np.ndarray:
    return memory[built.arena.offsets[value.buffer] + value.offset :][: value.buffer.nbytes - value.offset]


def _is_bad(built: BuiltGraph, memory: np.ndarray, value: Value, n_kv: int, left_out: LeftOut) -> bool:
    if value.type_id not in FLOATS or value.buffer.role != "value":
        return False
    values = strided(_bytes(built, memory, value), value, np.dtype(FLOATS[value.type_id]), n_kv)
    values = written_part(values, left_out)
    return bool((np.isnan(values) | (values == np.inf)).any())
