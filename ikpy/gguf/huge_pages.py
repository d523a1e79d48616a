"""Private memory in large pages: reserved ones (hugetlbfs pools) or transparent ones."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

POOLS = Path("/sys/kernel/mm/hugepages")
TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage")
PART_ALIGNMENT = 64
# Of mmap on Linux; the shift places the logarithm of a page's size.
_MAP_HUGETLB, _MAP_NORESERVE, _SIZE_SHIFT = 0x40000, 0x4000, 26


def private_memory(size: int) -> mmap.mmap:
    """Zeroed memory of this process alone, in transparent huge pages where the system has them.

    Only what is written to counts: it may be larger than the machine's memory.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    # Shared anonymous memory, the default, gets no huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if sys.platform == "linux" else 0)
    memory = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def zeroed_bytes(size: int) -> np.ndarray:
    """Zeroed uint8 [size] of this process alone, at a multiple of 64, in memory only once it is written to.

    As much as fills transparent huge pages lies in them; the rest is in small ones, so that little memory takes no more
    than its size. MemoryError if the system gives none.
    """
    page = transparent_page_size()
    in_pages = size // page * page if page and hasattr(mmap, "MADV_HUGEPAGE") else 0
    if not in_pages:
        zeros = np.zeros(size + 64, np.uint8)
        start = -zeros.ctypes.data % 64
        return zeros[start : start + size]
    try:
        mapped = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of memory: {error}") from error
    memory = np.frombuffer(mapped, np.uint8)
    start = -memory.ctypes.data % page
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE, start, in_pages)
    return memory[start : start + size]


class Block:
    """One block of `zeroed_bytes`, given out part by part, each at a multiple of 64: hardly any part lies outside of
    huge pages, however small it is. Parts never taken are only reserved."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._memory = zeroed_bytes(sum(map(_padded, sizes)))
        self._used = 0

    def take(self, size: int) -> np.ndarray:
        """The next uint8 [size]. ValueError if the block has no room for it."""
        if self._used + _padded(size) > self._memory.size:
            raise ValueError(f"a block of {self._memory.size} bytes, {self._used} of them used, lacks room for {size}")
        part = self._memory[self._used : self._used + size]
        self._used += _padded(size)
        return part


def _padded(size: int) -> int:
    return -(-size // PART_ALIGNMENT) * PART_ALIGNMENT


def reserved_memory(size: int) -> tuple[mmap.mmap, int] | None:
    """Zeroed memory in the largest reserved pages of which enough are free, and their size; None if there are none."""
    if sys.platform != "linux":
        return None
    for page_size, n_free in sorted(_free_pages().items(), reverse=True):
        n_pages = -(-size // page_size)
        if n_pages > n_free:
            continue
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB | (page_size.bit_length() - 1) << _SIZE_SHIFT
        with contextlib.suppress(OSError):  # another process was faster
            return mmap.mmap(-1, n_pages * page_size, flags=flags), page_size
    return None


def transparent_page_size() -> int:
    """Bytes of the transparent huge pages that large private memory gets; 0 where the system gives none."""
    try:
        if "[never]" in (TRANSPARENT / "enabled").read_text():
            return 0
        return int((TRANSPARENT / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def _free_pages() -> dict[int, int]:
    """Reserved pages that nobody uses or is promised, by their size in bytes."""
    found = {}
    for pool in POOLS.glob("hugepages-*kB"):
        with contextlib.suppress(OSError, ValueError):
            free, promised = (int((pool / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
            found[int(pool.name[10:-2]) << 10] = free - promised
    return found
