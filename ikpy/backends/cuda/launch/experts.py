"""Launches of routing to experts and of joining their results."""

from __future__ import annotations

import struct

from ikpy.backends.cuda.launch.base import (
    Launch,
    OpContext,
    ceil_div,
    i32,
    lowers,
    pointer,
)

# Assignments that one launch sorts (kernels/moe.cu); in generation a launch takes longer than the work.
_FEW_ENTRIES = 256


@lowers("moe_route")
def _moe_route(c: OpContext) -> list[Launch]:
    k, gating, normalize, n_group, n_group_used, ser_min = c.op.ip
    scale, threshold, epsilon = c.op.fp
    n_expert, tokens = c.source(0).shape[:2]
    integers = (n_expert, k, gating, normalize, n_group, n_group_used, ser_min)
    parameters = struct.pack("<7i3f", *integers, scale, threshold, epsilon)
    args = [c.dst, c.view(2), c.view(0), c.at(1), c.view(3), c.at(4), parameters]
    return [Launch("moe_route", (tokens, 1, 1), (32, 1, 1), 0, args)]


@lowers("moe_group")
def _moe_group(c: OpContext) -> list[Launch]:
    n_expert = c.op.ip[0]
    n = c.source(0).shape[0] * c.source(0).shape[1]
    args = [pointer(c.address(c.op.dst)), c.view(0), i32(n_expert)]
    if n <= _FEW_ENTRIES:
        return [Launch("moe_group", (1, 1, 1), (_FEW_ENTRIES, 1, 1), 0, args)]
    threads = 1024 if n > 4096 else 256
    return [
        Launch("moe_offsets", (1, 1, 1), (threads, 1, 1), 0, args),
        Launch("moe_entries", (ceil_div(n_expert, 4), 1, 1), (128, 1, 1), 0, args),
    ]


@lowers("moe_combine")
def _moe_combine(c: OpContext) -> list[Launch]:
    n, tokens = c.op.dst.shape[:2]
    args = [c.dst, c.view(0), c.view(1), c.view(2), c.view(3)]
    return [Launch("moe_combine", (tokens, ceil_div(n, 128), 1), (128, 1, 1), 0, args)]
