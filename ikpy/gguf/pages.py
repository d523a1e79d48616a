"""Whole pages of memory, which is what the system locks and reads."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

Area = tuple[int, int]
"""Address and bytes."""


def whole_pages(areas: Iterable[Area]) -> list[Area]:
    """Areas of whole pages that cover these, ascending and apart."""
    spans: list[tuple[int, int]] = []
    for address, nbytes in sorted(areas):
        first, end = address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if spans and first <= spans[-1][1]:
            first, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((first, end))
    return [(first, end - first) for first, end in spans if end > first]
