"""Private memory in large pages: reserved ones (hugetlbfs pools) or transparent ones."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ikpy.machine import threads

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
    huge pages, however small it is. Parts never taken are only reserved.

    reserved: takes reserved pages where enough can be had; `page_size` is their size, 0 without them.
    """

    def __init__(self, sizes: Iterable[int], *, reserved: bool = False) -> None:
        size = sum(map(_padded, sizes))
        found = _usable_reserved_memory(size) if reserved and size else None
        self._memory, self.page_size = found or (zeroed_bytes(size), 0)
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


def fitting_reserved_pages(size: int) -> list[int]:
    """Sizes of reserved pages of which enough are free, the largest first."""
    return [page for page, n_free in sorted(_free_pages().items(), reverse=True) if -(-size // page) <= n_free]


def reserved_memory(size: int) -> tuple[mmap.mmap, int] | None:
    """Zeroed memory in the largest reserved pages of which enough are free, and their size; None if there are none."""
    if sys.platform != "linux":
        return None
    for page_size in fitting_reserved_pages(size):
        n_pages = -(-size // page_size)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB | (page_size.bit_length() - 1) << _SIZE_SHIFT
        with contextlib.suppress(OSError):  # another process was faster
            return mmap.mmap(-1, n_pages * page_size, flags=flags), page_size
    return None


def _usable_reserved_memory(size: int) -> tuple[np.ndarray, int] | None:
    """Reserved memory uint8 [size] whose pages are all there, and their size.

    None if there are too few free ones, or on memory nodes only that this process may not use: touching those would end
    it, while the system refuses to read a file into them.
    """
    reserved = reserved_memory(size)
    if reserved is None:
        return None
    memory, page_size = np.frombuffer(reserved[0], np.uint8, size), reserved[1]
    with open("/dev/zero", "rb", buffering=0) as zeros, threads.pool(threads.physical_cores()) as pool:

        def touch(start: int) -> None:
            os.preadv(zeros.fileno(), [memory[start : start + 1].data], 0)

        try:
            list(pool.map(touch, range(0, size, page_size)))
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            return None
    return memory, page_size


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
