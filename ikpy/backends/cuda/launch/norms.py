"""Launches of norms, alone or with the preparation of activations."""

from __future__ import annotations

from ikpy.backends.cuda.launch.base import (
    ACT_Q8,
    Dim3,
    Launch,
    OpContext,
    act_row_bytes,
    ceil_div,
    f32,
    i64,
    lowers,
    n_rows,
)
from ikpy.graph.ir import Node


def _row_block(n: int) -> Dim3:
    """Threads for one row of n elements: at least four elements each."""
    return (min(1024, max(32, ceil_div(n, 4 * 32) * 32)), 1, 1)


@lowers("rms_norm")
def _rms_norm(c: OpContext) -> list[Launch]:
    args = [c.dst, c.view(0), c.view(1), c.view(2), c.view(3), f32(c.op.fp[0]), c.runtime]
    return [Launch("rms_norm", (n_rows(c.op.dst), 1, 1), _row_block(c.op.dst.shape[0]), 0, args)]


# Shared memory of a block without opting in to more.
_MAX_FUSED_ROW = 48 * 1024 // 4 - 256


def joined(norm: Node, prepare: Node) -> Node | None:
    """One op for an RMS norm and the int8 activation preparation of its result, or None if they do not fit together.

    Its sources are those of the norm and, last, the prepared activations, which it writes. Arenas must be planned with
    the joined op: it reads rows of its sources while other rows of its results are written.
    """
    if norm.kind != "rms_norm" or prepare.kind != "act_prepare" or prepare.ip[0] != ACT_Q8:
        return None
    x = prepare.src[0]
    if x is not norm.dst or x.shape[0] > _MAX_FUSED_ROW or x.dynamic_dim is not None or not x.is_contiguous:
        return None
    src = [*norm.src, *[None] * (4 - len(norm.src)), prepare.dst]
    return Node("rms_norm_q8", norm.dst, src, [], norm.fp, [*norm.writes, prepare.dst])


@lowers("rms_norm_q8")
def _rms_norm_q8(c: OpContext) -> list[Launch]:
    n = c.op.dst.shape[0]
    prepared = [c.at(4), i64(act_row_bytes(ACT_Q8, n))]
    args = [c.dst, c.view(0), c.view(1), c.view(2), c.view(3), f32(c.op.fp[0]), *prepared, c.runtime]
    shared = ceil_div(n, 256) * 256 * 4
    return [Launch("rms_norm_q8", (n_rows(c.op.dst), 1, 1), _row_block(n), shared, args)]


@lowers("layer_norm")
def _layer_norm(c: OpContext) -> list[Launch]:
    args = [c.dst, c.view(0), c.view(1), c.view(2), f32(c.op.fp[0]), c.runtime]
    return [Launch("layer_norm", (n_rows(c.op.dst), 1, 1), _row_block(c.op.dst.shape[0]), 0, args)]
