"""Python's collector of reference cycles, held off while graphs are planned.

A plan is tens of thousands of objects that stay. Each time some hundred are made the collector looks for cycles among
them, and now and then among everything else that the process has, which took a third of the time that plans take.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pauses:
    """Blocks of all threads that are under way, and whether the collector goes on behind the last one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.n = 0
        self.resume = False


_pauses = _Pauses()


@contextmanager
def paused_collection() -> Iterator[None]:
    """No collection starts by itself, in any thread, before the block ends; blocks may overlap."""
    with _pauses.lock:
        if not _pauses.n:
            _pauses.resume = gc.isenabled()
            gc.disable()
        _pauses.n += 1
    try:
        yield
    finally:
        with _pauses.lock:
            _pauses.n -= 1
            if not _pauses.n and _pauses.resume:
                gc.enable()
