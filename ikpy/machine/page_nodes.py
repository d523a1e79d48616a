"""Which memory node the pages of this process lie on (Linux), for reports and advice."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections import Counter

import numpy as np

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # numbers of the system call
_STEP = 1 << 16  # pages asked for in one call
_SAMPLES = 256  # of the pages of a file


def pages_by_node(address: int, nbytes: int) -> Counter[int]:
    """Numbers of the pages of a range that are in memory and in the page tables of this process, by memory node.

    Empty where the system does not tell.
    """
    call = _MOVE_PAGES.get(platform.machine()) if sys.platform == "linux" else None
    found: Counter[int] = Counter()
    if call is None:
        return found
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = range(first, address + nbytes, mmap.PAGESIZE)
    for start in range(0, len(pages), _STEP):
        step = pages[start : start + _STEP]
        addresses = (ctypes.c_void_p * len(step))(*step)
        status = (ctypes.c_int * len(step))()
        # No target nodes: the call moves nothing and tells where the pages are; negative numbers are errors.
        if libc.syscall(ctypes.c_long(call), 0, ctypes.c_ulong(len(step)), addresses, None, status, 0):
            return Counter()
        found.update(node for node in status if node >= 0)
    return found


def cached_pages_by_node(area: np.ndarray) -> Counter[int]:
    """The same for a sample of the pages of a mapped file, uint8 [bytes]: those that are in memory at all."""
    every = max(mmap.PAGESIZE, area.nbytes // _SAMPLES // mmap.PAGESIZE * mmap.PAGESIZE)
    found: Counter[int] = Counter()
    for start in range(-area.ctypes.data % mmap.PAGESIZE, area.nbytes, every):
        address = area.ctypes.data + start
        if _in_memory(address):
            area[start].item()  # puts the page into the page tables of this process, which alone are looked up
            found += pages_by_node(address, 1)
    return found


def _in_memory(address: int) -> bool:
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    state = ctypes.c_ubyte()
    if mincore is None or mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(state)):
        return False
    return bool(state.value & 1)
