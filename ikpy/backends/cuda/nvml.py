"""Free memory of GPUs from the management library, which needs no context on them (a context takes hundreds of MiB)."""

from __future__ import annotations

import ctypes
from functools import cache

from ikpy.backends.cuda.api import MemoryInfo

NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll")


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@cache
def _library() -> ctypes.CDLL | None:
    """The started library, None where it is not installed or does not start."""
    for name in NAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return None if library.nvmlInit_v2() else library
    return None


def memory_of(pci_bus_id: str) -> MemoryInfo | None:
    """Memory of the GPU at this bus address, None if it cannot be told."""
    library = _library()
    if library is None:
        return None
    device, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(device)):
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    return MemoryInfo(memory.free, memory.total)
