"""Arena planning: buffers whose lifetimes do not overlap share memory."""

from __future__ import annotations

from dataclasses import dataclass

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
    return _place(first, last)


def _place(first: dict[Buffer, int], last: dict[Buffer, int]) -> Arena:
    placed: list[tuple[int, int, Buffer]] = []  # offset, end
    offsets: dict[Buffer, int] = {}
    total = 0
    # Large buffers first: small ones then fill the gaps between them.
    for buffer in sorted(first, key=lambda b: (-b.nbytes, first[b])):
        size = -(-max(buffer.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        busy = [
            (offset, end)
            for offset, end, other in placed
            if first[other] <= last[buffer] and first[buffer] <= last[other]
        ]
        offset = _best_gap(sorted(busy), size)
        offsets[buffer] = offset
        placed.append((offset, offset + size, buffer))
        total = max(total, offset + size)
    return Arena(offsets, total)


def _best_gap(busy: list[tuple[int, int]], size: int) -> int:
    best, best_size = -1, 0
    end = 0
    for start, stop in busy:
        gap = start - end
        if gap >= size and (best < 0 or gap < best_size):
            best, best_size = end, gap
        end = max(end, stop)
    return best if best >= 0 else end
