"""Every node that a device runs, run once more by the CPU on the same inputs: finds the op behind wrong text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikpy.backends.cuda.check import (
    FLOATS,
    PREPARES,
    SKIPPED,
    LeftOut,
    describe,
    experts_left_out,
    finish,
    strided,
    written_part,
)
from ikpy.backends.cuda.launch import act_row_bytes
from ikpy.backends.cuda.launch.base import ACT_Q8
from ikpy.backends.cuda.memory import host_bytes, host_view
from ikpy.backends.cuda.plan import HybridPlan, Run
from ikpy.graph.assign import Step, read, written
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.placement import CPU
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import Arena

# Ops whose states are compared too; caches would be large.
ON_STATES = ("causal_conv", "gated_delta_rule", "ssm_scan", "wkv")


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
    left_out: LeftOut = None
    for step, operation in plan.singly():
        if step is None or step.device == CPU or step.node.kind in SKIPPED:
            finish(plan, step, operation, run)
            if step is not None:
                left_out = experts_left_out(plan, step, left_out)
            if step is not None and step.device != CPU:
                yield from _preparation_error(plan, step, run.n_kv, left_out)
            continue
        before = {v.buffer: _contents(plan, step, v.buffer) for v in (*read(step.node), *written(step.node))}
        finish(plan, step, operation, run)
        left_out = experts_left_out(plan, step, left_out)
        node = _on_host(_plain(step.node), before)
        CompiledPlan(core, [node], Arena({}, 0), 0).run(run.n_kv, run.n_threads)
        yield from _errors(plan, step, before, run.n_kv, left_out)
        yield from _preparation_error(plan, step, run.n_kv, left_out)


def _plain(node: Node) -> Node:
    """A node as the CPU has it: norms that prepare activations as well are joined on devices only."""
    if node.kind != PREPARES:
        return node
    return Node("rms_norm", node.dst, node.src[:-1], node.ip, node.fp, node.writes[:-1])


def _preparation_error(plan: HybridPlan, step: Step, n_kv: int, left_out: LeftOut) -> Iterator[NodeError]:
    """How far int8 activations are from what they were made of, which rounding makes 1/254 of a group's largest."""
    node = step.node
    x: Value | None
    prepared: Value | None
    if node.kind == PREPARES:
        x, prepared = node.dst, node.src[-1]
    elif node.kind == "act_prepare" and node.ip[0] == ACT_Q8:
        x, prepared = node.src[0], node.dst
    else:
        return
    assert x is not None and prepared is not None
    n = x.shape[0]
    source = _contents(plan, step, x.buffer)[x.offset :]
    truth = strided(source, x, np.dtype(np.float32), n_kv).reshape(-1, n)
    made = np.ones(len(truth), bool)
    if left_out is not None and left_out.size == len(truth):
        made = ~left_out.reshape(-1)
    rows = _contents(plan, step, prepared.buffer)[prepared.offset :][: len(truth) * act_row_bytes(ACT_Q8, n)]
    rows, padded = rows.reshape(len(truth), -1), -(-n // 256) * 256
    scales = np.ascontiguousarray(rows[:, padded : padded + padded // 8]).view(np.float32)
    with np.errstate(all="ignore"):
        ours = (rows[:, :padded].view(np.int8) * np.repeat(scales, 32, axis=1))[:, :n]
    difference = np.nan_to_num(np.abs(ours - truth)[made], nan=np.inf).max(initial=0.0)
    scale = np.abs(truth[made]).max(initial=1e-30)
    yield NodeError(step.device, "act_prepare", "", float(difference / scale), describe(step))


def _contents(plan: HybridPlan, step: Step, buffer: Buffer) -> np.ndarray:
    """Bytes of a buffer as the node sees it; weights and inputs are the host's own."""
    if buffer.role == "weight":
        return host_bytes(buffer)
    if buffer.role == "input":
        assert buffer.address is not None
        return host_view(buffer.address, buffer.nbytes)
    state = plan.states[step.device]
    memory = np.empty(buffer.nbytes + 64, np.uint8)
    data = memory[-memory.ctypes.data % 64 :][: buffer.nbytes]
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


def _errors(
    plan: HybridPlan, step: Step, host: dict[Buffer, np.ndarray], n_kv: int, left_out: LeftOut
) -> Iterator[NodeError]:
    types = ", ".join(dict.fromkeys(v.type_name for v in read(step.node) if v.buffer.role in ("weight", "cache")))
    for value in written(_plain(step.node)):
        if value.type_id not in FLOATS or not (value.buffer.role == "value" or step.node.kind in ON_STATES):
            continue
        dtype = np.dtype(FLOATS[value.type_id])
        actual = _contents(plan, step, value.buffer)
        ours, truth = (
            written_part(strided(data[value.offset :], value, dtype, n_kv), left_out).astype(np.float64)
            for data in (actual, host[value.buffer])
        )
        scale = np.abs(truth[np.isfinite(truth)]).max(initial=1e-30)
        with np.errstate(invalid="ignore"):
            difference = np.where(ours == truth, 0.0, np.nan_to_num(np.abs(ours - truth), nan=np.inf))
        yield NodeError(step.device, step.node.kind, types, float(difference.max(initial=0.0) / scale), describe(step))
