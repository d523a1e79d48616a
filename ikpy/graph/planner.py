"""Arena planning: buffers whose lifetimes do not overlap share memory."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ikpy.graph.ir import Buffer, Node

ALIGNMENT = 64
LASTING_STEPS = 64
"""Ranges in use for more steps than this are kept once, not with every step: where all values are fetched at the end,
as for importance matrices, lists per step would grow with the square of the graph."""


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
    # Lifetimes that overlap do so at the step where the later one begins.
    starts = sorted(set(first.values()))
    index = {step: i for i, step in enumerate(starts)}
    placed: list[list[tuple[int, int]]] = [[] for _ in starts]
    """Of every such step the ranges in use, without those of lasting buffers."""
    lasting: list[tuple[tuple[int, int], int, int]] = []
    offsets: dict[Buffer, int] = {}
    end = 0
    for buffer in order:
        size = -(-max(buffer.nbytes, 1) // alignment) * alignment
        steps = placed[index[first[buffer]] : bisect_right(starts, last[buffer])]
        busy = {span for span, begin, stop in lasting if begin <= last[buffer] and stop >= first[buffer]}
        offset = _best_gap(sorted(busy.union(*steps)), size)
        offsets[buffer] = offset
        if len(steps) > LASTING_STEPS:
            lasting.append(((offset, offset + size), first[buffer], last[buffer]))
        else:
            for step in steps:
                step.append((offset, offset + size))
        end = max(end, offset + size)
    return Arena(offsets, end)


def _best_gap(busy: list[tuple[int, int]], size: int) -> int:
    """Offset of the smallest gap between busy ranges, sorted by their start, that holds size bytes, or behind all."""
    best = None
    free = 0
    for start, end in busy:
        if start - free >= size and (best is None or start - free < best[0]):
            best = start - free, free
        free = max(free, end)
    return free if best is None else best[1]
