"""Mapped files of which nothing is in memory, and which pages of a mapping are."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest


def resident(data: np.ndarray) -> np.ndarray:
    """Which pages of mapped bytes, from the first on, are in memory: bool [n]."""
    pages = np.zeros(-(-data.size // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    status = mincore(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.size), ctypes.c_void_p(pages.ctypes.data))
    assert status == 0, os.strerror(ctypes.get_errno())
    return pages & 1 == 1


def cold_bytes(path: Path, size: int) -> np.ndarray:
    """Random bytes uint8 [size] in a new file, mapped; skips the test where files are always in memory."""
    path.write_bytes(os.urandom(size))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    if resident(data).any():
        pytest.skip("the file system of temporary files keeps its pages in memory")
    return data
