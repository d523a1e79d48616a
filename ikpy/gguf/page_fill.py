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
from collections.abc import Callable, Sequence

from ikpy.gguf.pages import Area

STEP = 16 << 20
N_THREADS = 4
_POPULATE_READ = 22  # advice to madvise, from Linux 5.14 on


class PageFill:
    """Threads that read whole pages of mapped files in the order of the areas, and map them.

    owners: keep the mappings. Does nothing on systems that cannot do that.
    """

    def __init__(self, areas: Sequence[Area], owners: object) -> None:
        self.areas, self._owners = areas, owners
        self._stopped = threading.Event()
        self._steps: queue.SimpleQueue[Area] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        advise = _advise()
        if advise is None or not areas or not advise(areas[0][0], 1, _POPULATE_READ):
            return
        self._advise = advise
        for address, nbytes in areas:
            advise(address, nbytes, mmap.MADV_HUGEPAGE)  # refused by kernels without transparent huge pages
            for start in range(0, nbytes, STEP):
                self._steps.put((address + start, min(STEP, nbytes - start)))
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
            while not self._stopped.is_set() and self._advise(*self._steps.get_nowait(), _POPULATE_READ):
                pass


def _advise() -> Callable[[int, int, int], bool] | None:
    """madvise of an address and a number of bytes; False if the system refuses or fails. None where there is none.

    Unlike the method of mmap.mmap, it lets other threads run meanwhile.
    """
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lambda address, nbytes, advice: madvise(address, nbytes, advice) == 0
