"""Launches of the ops of recurrent layers."""

from __future__ import annotations

from ikpy.backends.cuda.launch.base import MAX_GRID_YZ, Launch, OpContext, ceil_div, f32, i32, lowers
from ikpy.graph.ir import Node

# Tokens that a thread takes one after the other; more are a launch of their own for each, and one for the past.
_FEW_TOKENS = 8
_CHANNELS = 128
# Columns of a head's state per block, by the most rows that a kernel takes (kernels/recurrent.cu, ssm_scan.cu, wkv.cu).
_COLUMNS = {32: 32, 64: 32, 128: 16, 256: 16}
_MAX_ROWS = max(_COLUMNS)
# Most rows that the kernels of the scan with rates of every channel take.
_CHANNEL_ROWS = (16, 64)
# Where the states stand among the sources; the slots of the tokens follow.
_STATES = {"causal_conv": 2, "gated_delta_rule": 5, "ssm_scan": 6, "wkv": 6}


def unsupported(op: Node) -> str | None:
    """Why an op of a recurrent layer cannot run on a device, or None."""
    place, has_heads = _STATES[op.kind], op.kind != "causal_conv"
    state, slots = op.src[place : place + 2]
    assert slots is not None and state is not None
    rows, heads = (state.shape[1], state.shape[2]) if has_heads else (0, 0)
    most_rows = _CHANNEL_ROWS[-1] if _is_channel_scan(op) else _MAX_ROWS
    if rows > most_rows:
        return f"states of {rows} rows have no CUDA kernel (at most {most_rows})"
    n_slots = state.shape[3] if has_heads else state.shape[2]
    most = max(slots.shape[0], n_slots, heads)
    return f"{most} tokens, slots or heads at once are above {MAX_GRID_YZ}" if most > MAX_GRID_YZ else None


@lowers("causal_conv")
def _causal_conv(c: OpContext) -> list[Launch]:
    n_tokens = c.source(0).shape[1]
    blocks = ceil_div(c.op.dst.shape[0], _CHANNELS)
    options = [i32(n) for n in c.op.ip]
    args = [c.dst, c.view(0), c.view(1), c.view(2), c.at(3), c.at(4), *options, c.view(5), c.at(6)]
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
    size, columns = _kernel_for(dk)
    return [Launch(f"gated_delta_rule_{size}", (ceil_div(dv, columns), heads, n_slots), (128, 1, 1), 0, args)]


def _is_channel_scan(op: Node) -> bool:
    """Whether an op is the scan of Mamba: rates belong to channels."""
    return op.kind == "ssm_scan" and bool(op.ip) and op.ip[0] == 1


@lowers("ssm_scan")
def _ssm_scan(c: OpContext) -> list[Launch]:
    size, rows, heads, n_slots = c.source(6).shape
    args = [c.dst, *(c.view(i) for i in range(7)), c.at(7), c.view(8), c.at(9)]
    if _is_channel_scan(c.op):
        most = next(n for n in _CHANNEL_ROWS if rows <= n)
        return [Launch(f"channel_scan_{most}", (ceil_div(size, _CHANNELS), n_slots, 1), (_CHANNELS, 1, 1), 0, args)]
    most, columns = _kernel_for(rows)
    return [Launch(f"ssm_scan_{most}", (ceil_div(size, columns), heads, n_slots), (128, 1, 1), 0, args)]


@lowers("wkv")
def _wkv(c: OpContext) -> list[Launch]:
    dv, dk, heads, n_slots = c.source(6).shape
    args = [c.dst, *(c.view(i) for i in range(7)), c.at(7), i32(c.op.ip[0]), c.view(8), c.at(9)]
    size, columns = _kernel_for(dk)
    return [Launch(f"wkv_{size}", (ceil_div(dv, columns), heads, n_slots), (128, 1, 1), 0, args)]


def _kernel_for(rows: int) -> tuple[int, int]:
    """Most rows and columns per block of the smallest kernel that takes states of so many rows."""
    return next(item for item in _COLUMNS.items() if rows <= item[0])
