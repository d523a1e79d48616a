"""Every node that a device runs, run once more by the CPU on the same inputs: finds the op behind wrong text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikpy.backends.cuda.check import FLOATS, SKIPPED, describe, strided
from ikpy.backends.cuda.memory import host_view
from ikpy.backends.cuda.plan import HybridPlan, Run
from ikpy.graph.assign import Step, read, written
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.placement import CPU
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import Arena


@dataclass
class NodeError:
    """How far a device's result is from the CPU's, relative to the largest magnitude of the result."""

    device: str
    kind: str
    types: str
    error: float
    what: str


def compare_nodes(core: Any, plan: HybridPlan, run: Run) -> Iterator[NodeError]:
    """Runs a plan on the present inputs node by node; the errors of all nodes on devices with float results."""
    plan.start(run.n_kv)
    for step, operation in plan.singly():
        if step is None or step.device == CPU or step.node.kind in SKIPPED:
            operation(run)
            continue
        before = {v.buffer: _contents(plan, step, v.buffer) for v in (*read(step.node), *written(step.node))}
        operation(run)
        node = _on_host(step.node, before)
        CompiledPlan(core, [node], Arena({}, 0), 0).run(run.n_kv, run.n_threads)
        yield from _errors(plan, step, before, run.n_kv)


def _contents(plan: HybridPlan, step: Step, buffer: Buffer) -> np.ndarray:
    """Bytes of a buffer as the node sees it; weights and inputs are the host's own."""
    if buffer.role in ("weight", "input"):
        assert buffer.address is not None
        return host_view(buffer.address, buffer.nbytes)
    state = plan.states[step.device]
    data = np.empty(buffer.nbytes + 64, np.uint8)
    data = data[-data.ctypes.data % 64 :][: buffer.nbytes]
    state.stream.download(data, state.base(buffer, plan.graph.arenas[step.device]))
    state.stream.synchronize()
    return data


def _on_host(node: Node, contents: dict[Buffer, np.ndarray]) -> Node:
    """The node over copies of its buffers in host memory."""

    def moved(value: Value | None) -> Value | None:
        if value is None:
            return None
        data = contents[value.buffer]
        buffer = Buffer(data.nbytes, data.ctypes.data, data)
        return Value(buffer, value.type_id, value.shape, value.strides, value.offset, value.dynamic_dim)

    dst = moved(node.dst)
    assert dst is not None
    return Node(node.kind, dst, [moved(v) for v in node.src], node.ip, node.fp)


def _errors(plan: HybridPlan, step: Step, host: dict[Buffer, np.ndarray], n_kv: int) -> Iterator[NodeError]:
    types = ", ".join(dict.fromkeys(v.type_name for v in read(step.node) if v.buffer.role in ("weight", "cache")))
    for value in written(step.node):
        if value.type_id not in FLOATS or value.buffer.role != "value":
            continue
        dtype = np.dtype(FLOATS[value.type_id])
        actual = _contents(plan, step, value.buffer)
        ours, truth = (
            strided(data[value.offset :], value, dtype, n_kv).astype(np.float64)
            for data in (actual, host[value.buffer])
        )
        scale = np.abs(truth[np.isfinite(truth)]).max(initial=1e-30)
        with np.errstate(invalid="ignore"):
            difference = np.where(ours == truth, 0.0, np.nan_to_num(np.abs(ours - truth), nan=np.inf))
        yield NodeError(step.device, step.node.kind, types, float(difference.max(initial=0.0) / scale), describe(step))
