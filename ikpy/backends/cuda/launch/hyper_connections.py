"""Launches of hyper-connections and of compressed cache entries."""

from __future__ import annotations

import struct

from ikpy.backends.cuda.launch.base import Launch, OpContext, ceil_div, f32, i32, lowers
from ikpy.backends.cuda.launch.limits import DEFAULT_SHARED_BYTES
from ikpy.graph.ir import Node

_THREADS = 128


@lowers("hyper_weights")
def _hyper_weights(c: OpContext) -> list[Launch]:
    n, iterations = c.op.ip
    args = [c.dst, c.view(0), c.at(1), c.at(2), i32(n), i32(iterations), *map(f32, c.op.fp)]
    return [Launch("hyper_weights", (c.op.dst.shape[1], 1, 1), (32, 1, 1), 0, args)]


@lowers("hyper_collapse", "hyper_expand")
def _hyper_streams(c: OpContext) -> list[Launch]:
    dst = c.op.dst
    args = [c.dst, *(c.view(i) for i in range(len(c.op.src)))]
    grid = (dst.shape[1] if c.op.kind == "hyper_collapse" else dst.shape[2], ceil_div(dst.shape[0], _THREADS), 1)
    return [Launch(c.op.kind, grid, (_THREADS, 1, 1), 0, args)]


def _list_bytes(op: Node) -> int:
    """Bytes of the list of an entry's cells."""
    values, bias = op.src[0], op.src[2]
    assert values is not None and bias is not None
    return 4 * bias.shape[1] * (values.shape[0] // op.dst.shape[0])


def unsupported(op: Node) -> str | None:
    """Why entries cannot be made on a device, or None."""
    if _list_bytes(op) > DEFAULT_SHARED_BYTES:
        return f"entries of {_list_bytes(op) // 4} cells have no CUDA kernel (at most {DEFAULT_SHARED_BYTES // 4})"
    return None


@lowers("compress_cells")
def _compress_cells(c: OpContext) -> list[Launch]:
    size, n_entries = c.op.dst.shape[:2]
    sizes = struct.pack("<3i4x", c.source(3).shape[0], c.source(5).shape[0], c.source(2).shape[1])
    stretches = b"".join(c.at(i) for i in range(3, 8)) + sizes
    args = [c.dst, c.view(0), c.view(1), c.view(2), stretches]
    grid = (n_entries, ceil_div(size, _THREADS), 1)
    return [Launch("compress_cells", grid, (_THREADS, 1, 1), _list_bytes(c.op), args)]
