"""Arena planning: buffers whose lifetimes do not overlap share memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikpy.graph.ir import Buffer, Node

ALIGNMENT = 64


@dataclass
class Arena:
    """Offset of every arena buffer and the total size in bytes."""

    offsets: dict[Buffer, int]
    nbytes: int


def plan_arena(nodes: list[Node], keep: set[Buffer]) -> Arena:
    """Best-fit placement by lifetime. Buffers in keep (inputs and results) live through the whole run."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for i, node in enumerate(nodes):
        for value in (node.dst, *node.src, *node.writes):
            if value is None or value.buffer.address is not None:
                continue
            first.setdefault(value.buffer, i)
            last[value.buffer] = i
    for buffer in keep:
        if buffer.address is None:
            first[buffer], last[buffer] = 0, len(nodes)
    return place_buffers(first, last)


def place_buffers(first: dict[Buffer, int], last: dict[Buffer, int], alignment: int = ALIGNMENT) -> Arena:
    """Offsets of buffers that hold something from step first[b] to step last[b], both included."""
    # Large buffers first: small ones then fill the gaps between them.
    order = sorted(first, key=lambda b: (-b.nbytes, first[b]))
    starts, ends = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    begins = np.array([first[b] for b in order], np.int64)
    finishes = np.array([last[b] for b in order], np.int64)
    offsets: dict[Buffer, int] = {}
    for i, buffer in enumerate(order):
        size = -(-max(buffer.nbytes, 1) // alignment) * alignment
        together = np.flatnonzero((begins[:i] <= finishes[i]) & (begins[i] <= finishes[:i]))
        offset = _best_gap(starts[together], ends[together], size)
        offsets[buffer] = offset
        starts[i], ends[i] = offset, offset + size
    return Arena(offsets, int(ends.max(initial=0)))


def _best_gap(starts: np.ndarray, ends: np.ndarray, size: int) -> int:
    """Offset of the smallest gap between busy ranges that holds size bytes, or the end of them all."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    busy_until = np.concatenate([[0], np.maximum.accumulate(ends[order])])
    gaps = starts[order] - busy_until[:-1]
    fitting = np.flatnonzero(gaps >= size)
    if not len(fitting):
        return int(busy_until[-1])
    return int(busy_until[fitting[np.argmin(gaps[fitting])]])
