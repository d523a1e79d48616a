"""Bringing mapped files into memory while other work goes on, in huge pages where the file system has them.

File systems that keep files in folios of up to 2 MiB (XFS; ext4 from Linux 6.16 on) read whole huge pages for mappings
that ask for them, which saves looking up each of 512 small ones. A missing one takes longer to read, which is why
threads here read ahead of those that compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ikpy.gguf.file_bytes import memory_map

STEP = 16 << 20
N_THREADS = 4
_POPULATE_READ = 22  # advice to madvise, from Linux 5.14 on


class PageFill:
    """Threads that read bytes uint8 [n] of mapped files, in their order; views of adjacent bytes do best.

    Does nothing on systems that cannot do that.
    """

    def __init__(self, areas: Sequence[np.ndarray]) -> None:
        self._areas = areas  # holds the mappings
        self._stopped = threading.Event()
        self._steps: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        populate = _populate()
        pages = [_pages(area) for area in areas if area.size]
        if populate is None or not pages or not populate(pages[0][0], 1):
            return
        self._populate = populate
        for area in areas:
            _ask_for_huge_pages(area)
        for first, nbytes in pages:
            for start in range(0, nbytes, STEP):
                self._steps.put((first + start, min(STEP, nbytes - start)))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(N_THREADS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads, each after what it is reading."""
        self._stopped.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all is read or given up, so many seconds per thread at most; whether it is."""
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._stopped.is_set() and self._populate(*self._steps.get_nowait()):
                pass


def joined_areas(areas: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Number, first byte and end of areas of numbered files, in order, those of neighbours joined."""
    joined: list[tuple[int, int, int]] = []
    for number, start, end in sorted(areas):
        is_neighbour = joined and joined[-1][0] == number and start - joined[-1][2] < mmap.PAGESIZE
        joined.append((number, joined.pop()[1] if is_neighbour else start, end))
    return joined


def _pages(area: np.ndarray) -> tuple[int, int]:
    """Address and bytes of the pages under an area."""
    first = area.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return first, area.ctypes.data + area.size - first


def _ask_for_huge_pages(area: np.ndarray) -> None:
    mapping = memory_map(area)
    if mapping is not None:
        first, nbytes = _pages(area)
        start = first - np.frombuffer(mapping, np.uint8).ctypes.data
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes)


def _populate() -> Callable[[int, int], bool] | None:
    """Reads the pages of an address and a number of bytes and maps them; False if the system refuses or fails."""
    if sys.platform != "linux":
        return None
    # Unlike the method of mmap.mmap, this lets other threads run meanwhile.
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lambda address, nbytes: madvise(address, nbytes, _POPULATE_READ) == 0
