"""The driver library itself, and the life of PyCUDA's objects.

PyCUDA has no interface to CUDA graphs and to some copies: those calls go to the library, on PyCUDA's handles.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import pycuda.driver as cuda

from ikpy.backends.cuda.api import DeviceError

# Errors after which the driver takes nothing more of the process: ECC, NVLink, contained (of hardware, or of a peer's
# memory), illegal address, timeout, assertion, hardware stack, illegal instruction, misaligned address, invalid address
# space, invalid program counter, launch failure, tensor memory, and the end of an MPS client.
LOST = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810})


@cache
def loaded() -> ctypes.CDLL:
    """The driver library; DeviceError if there is none."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DeviceError("the CUDA driver library is not found")


def call(name: str, *arguments: Any) -> None:
    """Calls the driver library; its errors are raised as PyCUDA raises them."""
    try:
        function = getattr(loaded(), name)
    except AttributeError:
        major, minor = divmod(cuda.get_driver_version(), 1000)
        version = f"{major}.{minor // 10}"
        raise DeviceError(f"the driver, for CUDA {version}, has no {name}: 11.4 or later is needed") from None
    status = function(*arguments)
    if status:
        text = ctypes.c_char_p()
        loaded().cuGetErrorString(status, ctypes.byref(text))
        raise cuda.Error(f"{name} failed: {(text.value or b'unknown error').decode()} ({status})")


def keep(thing: object) -> None:
    """Keeps an object of PyCUDA until give_back, and at exit for good: the driver frees everything then.

    PyCUDA's destructors would warn of whatever another thread's context holds, and of every call that a GPU refuses.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def give_back(thing: object) -> None:
    """Ends what `keep` began."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))
