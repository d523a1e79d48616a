"""Looks at every value of a plan while it runs once: a kernel that makes a NaN is found before it makes gibberish."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.memory import host_view
from ikpy.backends.cuda.plan import HybridPlan, Operation, Run
from ikpy.graph.assign import Step, read, written
from ikpy.graph.ir import F16, F32, Value
from ikpy.graph.placement import CPU

# Values in formats of their own; masks, of which only a part is written.
SKIPPED = ("act_prepare", "kq_mask", "chosen_mask", "chosen_list", "stretch_cells")
# The last of its results is in such a format.
PREPARES = "rms_norm_q8"
# Its first result is the experts that it chooses.
ROUTES = "moe_route"
FLOATS = {F32: np.float32, F16: np.float16}
LeftOut = NDArray[np.bool_] | None
"""Experts that tokens were to be sent to and are not (-ser), bool [1, T, K]: no product writes their results."""


def check_values(plan: HybridPlan, run: Run) -> None:
    """Runs the plan on the present inputs node by node.

    Raises DeviceError that names the device, the op and the weight of the first value that is not a number, or of the
    first kernel that fails.
    """
    plan.start(run.n_kv)
    left_out: LeftOut = None
    for step, operation in plan.singly():
        if step is not None and step.node.dst.buffer.role == "host":
            continue  # statistics, which this token is not to count in
        finish(plan, step, operation, run)
        if step is None:
            continue
        left_out = experts_left_out(plan, step, left_out)
        values = written(step.node)
        for value in values[:-1] if step.node.kind == PREPARES else values:
            _check(plan, step, value, run.n_kv, left_out)


def experts_left_out(plan: HybridPlan, step: Step, before: LeftOut) -> LeftOut:
    """Those of the layer that a step has begun when it has run, or belongs to."""
    ids = step.node.dst
    return left_out_of(ids, _bytes(plan, step.device, ids)) if step.node.kind == ROUTES else before


def left_out_of(ids: Value, data: np.ndarray) -> LeftOut:
    """Those that have no number among the chosen ones i32 [K, T], given as bytes."""
    return np.asarray(strided(data, ids, np.dtype(np.int32), 0)[0] < 0)


def written_part(values: np.ndarray, left_out: LeftOut) -> np.ndarray:
    """Elements in numpy order, with zeros for experts that are left out."""
    if left_out is None or values.shape[:-1] != left_out.shape or not left_out.any():
        return values
    return np.where(left_out[..., None], values.dtype.type(0), values)


def finish(plan: HybridPlan, step: Step | None, operation: Operation, run: Run) -> None:
    """Runs an operation of a plan to its end, or else the error of a kernel would show in a later one.

    Raises DeviceError that names the node.
    """
    try:
        operation(run)
        if step is not None and step.device != CPU:
            plan.states[step.device].stream.synchronize()
    except DeviceError as error:
        if step is None:
            raise
        raise DeviceError(f"{describe(step)} fails on {step.device}: {error}") from error


def _check(plan: HybridPlan, step: Step, value: Value, n_kv: int, left_out: LeftOut) -> None:
    if value.type_id not in FLOATS or value.buffer.role != "value" or step.node.kind in SKIPPED:
        return
    dtype = np.dtype(FLOATS[value.type_id])
    values = strided(_bytes(plan, step.device, value), value, dtype, n_kv)
    bad = np.argwhere(np.isnan(written_part(values, left_out)))
    if len(bad):
        where = ", ".join(str(i) for i in reversed(bad[0].tolist()))
        raise DeviceError(
            f"{step.device}: {describe(step)} gives NaN at element [{where}] ({len(bad)} of {values.size} values); "
            "keep the tensor on the CPU with -ot NAME=CPU and report this"
        )


def _bytes(plan: HybridPlan, device: str, value: Value) -> np.ndarray:
    """Bytes of the value's buffer from its first element on."""
    nbytes = value.buffer.nbytes - value.offset
    if device == CPU:
        return host_view(plan.host_address(value.buffer) + value.offset, nbytes)
    state = plan.states[device]
    data = np.empty(nbytes, np.uint8)
    state.stream.download(data, state.base(value.buffer, plan.graph.arenas[device]) + value.offset)
    state.stream.synchronize()
    return data


def strided(data: np.ndarray, value: Value, dtype: np.dtype, n_kv: int) -> np.ndarray:
    """The elements in numpy order; only n_kv of the dimension that changes from run to run."""
    shape = list(value.shape)
    if value.dynamic_dim is not None:
        shape[value.dynamic_dim] = min(n_kv, shape[value.dynamic_dim])
    strides = [dtype.itemsize, *value.strides[1:]]
    usable = data[: data.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(usable, shape[::-1], strides[::-1], writeable=False)


def describe(step: Step) -> str:
    """The op, the weights and the cache of a step."""
    weights = [v for v in read(step.node) if v.buffer.role == "weight"]
    named = [f"{v.buffer.name} ({v.type_name})" for v in weights if v.buffer.name]
    caches = [v.buffer.name for v in written(step.node) if v.buffer.role == "cache"]
    return step.node.kind + "".join(
        f" {word} {', '.join(names)}" for word, names in (("with", named), ("to", caches)) if names
    )
