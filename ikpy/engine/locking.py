"""Locking memory so that the system does not page it out (--mlock)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import numpy as np


def lock_memory(areas: Sequence[np.ndarray], log: Callable[[str], None]) -> int:
    """Locks the pages of these arrays; returns the bytes locked. What the system refuses is logged, not an error."""
    try:
        mlock = ctypes.CDLL(None, use_errno=True).mlock
    except (OSError, AttributeError):
        log("warning: mlock is not available on this system")
        return 0
    mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    locked = 0
    for area in areas:
        if mlock(area.ctypes.data, area.nbytes):
            reason = os.strerror(ctypes.get_errno())
            log(
                f"warning: failed to mlock {area.nbytes}-byte buffer (after previously locking {locked} bytes): "
                f"{reason}; try a larger limit (ulimit -l)"
            )
            return locked
        locked += area.nbytes
    return locked
