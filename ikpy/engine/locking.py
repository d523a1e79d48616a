"""Locking memory so that the system does not page it out (--mlock)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable

from ikpy.gguf.pages import Area, whole_pages


def lock_memory(areas: Iterable[Area], log: Callable[[str], None]) -> int:
    """Locks the pages of these areas; returns the bytes locked. What the system refuses is logged, not an error."""
    try:
        mlock = ctypes.CDLL(None, use_errno=True).mlock
    except (OSError, AttributeError):
        log("warning: mlock is not available on this system")
        return 0
    mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    locked = 0
    for address, nbytes in whole_pages(areas):
        if mlock(address, nbytes):
            reason = os.strerror(ctypes.get_errno())
            log(
                f"warning: failed to mlock {nbytes}-byte buffer (after previously locking {locked} bytes): "
                f"{reason}; try a larger limit (ulimit -l)"
            )
            return locked
        locked += nbytes
    return locked
