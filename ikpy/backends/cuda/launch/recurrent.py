"""Launches of the ops of recurrent layers."""

from __future__ import annotations

from ikpy.backends.cuda.launch.base import MAX_GRID_YZ, Launch, OpContext, ceil_div, f32, i32, lowers
from ikpy.graph.ir import Node

# Tokens that a thread takes one after the other; more are a launch of their own for each, and one for the past.
_FEW_TOKENS = 8
_CHANNELS = 128
# Columns of a head's state per block, by the largest size of keys that a kernel takes (kernels/recurrent.cu).
_COLUMNS = {32: 32, 64: 32, 128: 16, 256: 16}
_MAX_KEYS = max(_COLUMNS)


def unsupported(op: Node) -> str | None:
    """Why an op of a recurrent layer cannot run on a device, or None."""
    is_rule = op.kind == "gated_delta_rule"
    state, slots = op.src[5:7] if is_rule else op.src[2:4]
    assert slots is not None and state is not None
    dk, heads = (state.shape[1], state.shape[2]) if is_rule else (0, 0)
    if dk > _MAX_KEYS:
        return f"states of {dk} rows have no CUDA kernel (at most {_MAX_KEYS})"
    n_slots = state.shape[3] if is_rule else state.shape[2]
    most = max(slots.shape[0], n_slots, heads)
    return f"{most} tokens, slots or heads at once are above {MAX_GRID_YZ}" if most > MAX_GRID_YZ else None


@lowers("causal_conv")
def _causal_conv(c: OpContext) -> list[Launch]:
    n_tokens = c.source(0).shape[1]
    blocks = ceil_div(c.op.dst.shape[0], _CHANNELS)
    args = [c.dst, c.view(0), c.view(1), c.view(2), c.at(3), i32(c.op.ip[0]), c.view(4), c.at(5)]
    if n_tokens <= _FEW_TOKENS:
        return [Launch("causal_conv_few", (blocks, 1, 1), (_CHANNELS, 1, 1), 0, args)]
    past = [c.view(2), c.view(0), c.at(3)]
    return [
        Launch("causal_conv", (blocks, n_tokens, 1), (_CHANNELS, 1, 1), 0, args),
        Launch("causal_conv_past", (blocks, c.source(2).shape[2], 1), (_CHANNELS, 1, 1), 0, past),
    ]


@lowers("gated_delta_rule")
def _gated_delta_rule(c: OpContext) -> list[Launch]:
    dv, dk, heads, n_slots = c.source(5).shape
    views = [c.dst, *(c.view(i) for i in range(6)), c.at(6)]
    options = [f32(c.op.fp[0]), f32(c.op.fp[1]), i32(c.op.ip[0]), i32(c.op.ip[1])]
    args = [*views, *options, c.view(7), c.at(8)]
    size, columns = next(item for item in _COLUMNS.items() if dk <= item[0])
    return [Launch(f"gated_delta_rule_{size}", (ceil_div(dv, columns), heads, n_slots), (128, 1, 1), 0, args)]
