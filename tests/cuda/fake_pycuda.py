"""A stand-in for pycuda.driver and the driver library, with the names and signatures of PyCUDA 2026.1, in host memory.

It lets the package driver itself run without a GPU. Contexts are checked as CUDA checks them: whatever needs a current
context fails without one, and with that of another device. What dies in another thread than the one that made its
context, without that context being current, is leaked, as PyCUDA leaks it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from ikpy.backends.cuda.launch import limits


class _Stack(threading.local):
    """Contexts of a thread, the current one last."""

    def __init__(self) -> None:
        self.contexts: list[FakeContext] = []


stack = _Stack()
broken: list[bool] = []
# Streams, events and pinned blocks that were made and not destroyed, by class.
live: Counter[str] = Counter()
FREE, TOTAL = 1 << 30, 2 << 30


class Error(Exception):
    pass


class LogicError(Error):
    pass


class OutOfMemory(Error):
    pass


def _need_context(owner: FakeContext | None = None) -> FakeContext:
    if not stack.contexts:
        raise LogicError("invalid device context")
    if owner is not None and stack.contexts[-1] is not owner:
        raise LogicError("the current context is that of another device")
    return stack.contexts[-1]


class _Owned:
    """Something of a context that its destructor gives back."""

    def __init__(self) -> None:
        self.context = _need_context()
        live[type(self).__name__] += 1

    def __del__(self) -> None:
        known = stack.contexts and stack.contexts[-1] is self.context
        if known or threading.get_ident() == self.context.thread:
            live[type(self).__name__] -= 1


class FakeContext:
    by_handle: ClassVar[WeakValueDictionary[int, FakeContext]] = WeakValueDictionary()

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle = id(self)
        FakeContext.by_handle[self.handle] = self
        self.memory: dict[int, np.ndarray] = {}
        self.thread = threading.get_ident()

    def push(self) -> None:
        stack.contexts.append(self)

    @staticmethod
    def pop() -> None:
        stack.contexts.pop()

    @staticmethod
    def enable_peer_access(peer: FakeContext, flags: int = 0) -> None:
        assert _need_context() is not peer

    @staticmethod
    def disable_peer_access(peer: FakeContext) -> None:
        assert _need_context() is not peer

    def owns(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + m.nbytes for start, m in self.memory.items())


class Device:
    n_devices = 2

    def __init__(self, index: int) -> None:
        self.index = index
        self.context: FakeContext | None = None

    @staticmethod
    def count() -> int:
        return Device.n_devices

    def name(self) -> str:
        return f"Fake GPU {self.index}"

    def compute_capability(self) -> tuple[int, int]:
        return 8, 6

    def can_access_peer(self, other: Device) -> bool:
        return other is not self

    def total_memory(self) -> int:
        return TOTAL

    def pci_bus_id(self) -> str:
        return f"0000:0{self.index}:00.0"

    def retain_primary_context(self) -> FakeContext:
        self.context = self.context or FakeContext(self)
        return self.context


class DeviceAllocation:
    def __init__(self, nbytes: int) -> None:
        self._context = _need_context()
        block = np.full(nbytes + 256, 0xFF, np.uint8)
        self._address = block.ctypes.data + -block.ctypes.data % 256
        self._context.memory[self._address] = block[self._address - block.ctypes.data :]

    def __int__(self) -> int:
        return self._address

    def free(self) -> None:
        _need_context(self._context)
        del self._context.memory[self._address]
        for stream in list(Stream.by_handle.values()):
            stream.spoiled |= stream.captured is not None and not stream.relaxed


class Stream(_Owned):
    by_handle: ClassVar[WeakValueDictionary[int, Stream]] = WeakValueDictionary()
    handles: ClassVar[Iterator[int]] = count(1)

    def __init__(self, flags: int = 0) -> None:
        assert flags == 1, "a stream that waits for the default stream"
        super().__init__()
        self.handle = next(Stream.handles)
        Stream.by_handle[self.handle] = self
        self.captured: list[Callable[[], None]] | None = None
        # Of a capture: the mode that allows memory to be freed meanwhile, and whether it was without that mode.
        self.relaxed = self.spoiled = False

    def do(self, operation: Callable[[], None]) -> None:
        _need_context(self.context)
        if self.captured is not None:
            self.captured.append(operation)
        else:
            operation()

    def synchronize(self) -> None:
        _need_context(self.context)
        assert self.captured is None

    def wait_for_event(self, event: Event) -> None:
        _need_context(self.context)


class Event(_Owned):
    def __init__(self, flags: int = 0) -> None:
        super().__init__()
        self.timed = flags != event_flags.DISABLE_TIMING
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> Event:
        assert stream is not None and stream.context is self.context, "an event of another context"
        self.at = Function.launched * MILLISECONDS_PER_LAUNCH
        return self

    def time_since(self, earlier: Event) -> float:
        assert self.timed and earlier.timed, "an event without timing"
        assert self.at is not None and earlier.at is not None
        return self.at - earlier.at

    def synchronize(self) -> Event:
        if broken:
            raise Error("cuEventSynchronize failed: an illegal memory access was encountered")
        return self


def _inside(address: int, nbytes: int, context: FakeContext) -> None:
    if not context.owns(address, nbytes):
        raise LogicError(f"{address:#x} is no memory of device {context.device.index}")


def memcpy_htod_async(dest: int, src: np.ndarray, stream: Stream) -> None:
    _inside(dest, src.nbytes, stream.context)
    stream.do(lambda: ctypes.memmove(dest, src.ctypes.data, src.nbytes))  # type: ignore[arg-type, return-value]


def memcpy_dtoh_async(dest: np.ndarray, src: int, stream: Stream) -> None:
    _inside(src, dest.nbytes, stream.context)
    stream.do(lambda: ctypes.memmove(dest.ctypes.data, src, dest.nbytes))  # type: ignore[arg-type, return-value]


def memcpy_dtod_async(dest: int, src: int, size: int, stream: Stream) -> None:
    _inside(src, size, stream.context)
    _inside(dest, size, stream.context)
    stream.do(lambda: ctypes.memmove(dest, src, size))  # type: ignore[arg-type, return-value]


def memset_d8_async(dest: int, data: int, size: int, stream: Stream) -> None:
    _inside(dest, size, stream.context)
    stream.do(lambda: ctypes.memset(dest, data, size))  # type: ignore[arg-type, return-value]


def get_driver_version() -> int:
    return 12040


def mem_get_info() -> tuple[int, int]:
    used = sum(m.nbytes for m in _need_context().memory.values())
    return FREE - used, TOTAL


def mem_alloc(nbytes: int) -> DeviceAllocation:
    if nbytes > mem_get_info()[0]:
        raise OutOfMemory("out of memory")
    return DeviceAllocation(nbytes)


class PagelockedHostAllocation(_Owned):
    """The base of pinned arrays."""

    limit: ClassVar[int] = 1 << 30

    def __init__(self, nbytes: int) -> None:
        if nbytes > self.limit:
            raise OutOfMemory("cuMemHostAlloc failed: out of memory")
        super().__init__()
        self._memory = np.empty(nbytes, np.uint8)
        self.__array_interface__ = self._memory.__array_interface__


def pagelocked_empty(shape: int, dtype: Any, order: str = "C", mem_flags: int = 0) -> np.ndarray:
    assert dtype is np.uint8 and mem_flags == host_alloc_flags.PORTABLE
    return np.asarray(PagelockedHostAllocation(shape))


class Packed(bytes):
    """A parameter buffer that remembers its arguments."""

    args: list[bytes]


# Static shared memory of every kernel, which counts as well.
STATIC_SHARED = 1024
MILLISECONDS_PER_LAUNCH = 0.5


class Function:
    launcher: Callable[[str, Any, Any, int, list[bytes]], None]
    launched = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.shared = (48 << 10) - STATIC_SHARED

    def get_attribute(self, attribute: str) -> int:
        assert attribute == "SHARED_SIZE_BYTES"
        return STATIC_SHARED

    def set_attribute(self, attribute: str, value: int) -> None:
        assert attribute == "MAX_DYNAMIC_SHARED_SIZE_BYTES"
        _need_context()
        if value + STATIC_SHARED > limits.shared_bytes(Device.compute_capability(_need_context().device)):
            raise LogicError("set_attribute: cuFuncSetAttribute failed: invalid argument")
        self.shared = value

    def _launch_kernel(
        self, grid: limits.Dim3, block: limits.Dim3, buffer: Packed, shared: int, stream: Stream
    ) -> None:
        if shared > self.shared or limits.geometry_fault(self.name, grid, block):
            raise LogicError("launch: cuLaunchKernel failed: invalid argument")
        if len(buffer) > limits.MAX_PARAMETER_BYTES:
            raise LogicError("cuLaunchKernel failed: invalid value")
        Function.launched += 1
        stream.do(lambda: Function.launcher(self.name, grid, block, shared, buffer.args))


class Module:
    def __init__(self, content: bytes) -> None:
        if content.startswith(b"damaged"):
            raise LogicError("cuModuleLoadDataEx failed: device kernel image is invalid")
        if len(content) > mem_get_info()[0]:
            raise OutOfMemory("cuModuleLoadDataEx failed: out of memory")
        self.kernels = content.decode().split()

    def get_function(self, name: str) -> Function:
        _need_context()
        if name not in self.kernels:
            raise LogicError("named symbol not found")
        return Function(name)


class Library:
    """The functions of libcuda for graphs, and for copies between devices."""

    def __init__(self) -> None:
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.replays = 0
        self.executables: set[int] = set()
        self.handles = count(1)

    def cuCtxSynchronize(self) -> int:
        return 700 if broken else 0

    def cuMemcpyPeerAsync(self, *arguments: Any) -> int:
        dest, dest_context, src, src_context, size, stream = (each.value for each in arguments)
        _inside(dest, size, FakeContext.by_handle[dest_context])
        _inside(src, size, FakeContext.by_handle[src_context])
        Stream.by_handle[stream].do(lambda: ctypes.memmove(dest, src, size))  # type: ignore[arg-type, return-value]
        return 0

    def cuStreamBeginCapture_v2(self, stream: ctypes.c_void_p, mode: ctypes.c_int) -> int:
        source = Stream.by_handle[stream.value or 0]
        source.captured, source.relaxed, source.spoiled = [], mode.value == 2, False
        return 0

    def cuStreamEndCapture(self, stream: ctypes.c_void_p, graph: Any) -> int:
        source = Stream.by_handle[stream.value or 0]
        assert source.captured is not None
        graph._obj.value = next(self.handles)
        self.graphs[graph._obj.value] = source.captured
        source.captured = None
        return 901 if source.spoiled else 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: ctypes.c_void_p, flags: Any) -> int:
        assert graph.value
        executable._obj.value = graph.value
        self.executables.add(graph.value)
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        return 0

    def cuGraphExecDestroy(self, graph: Any) -> int:
        _need_context()
        self.executables.remove(graph.value)
        return 0

    def cuGraphLaunch(self, graph: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        self.replays += 1
        for operation in self.graphs[graph.value or 0]:
            operation()
        return 0


class event_flags:
    DISABLE_TIMING = 2


class host_alloc_flags:
    PORTABLE = 1


class function_attribute:
    MAX_DYNAMIC_SHARED_SIZE_BYTES = "MAX_DYNAMIC_SHARED_SIZE_BYTES"
    SHARED_SIZE_BYTES = "SHARED_SIZE_BYTES"


def _is_replaced(name: str) -> bool:
    """Whether a module is PyCUDA's, or imports it."""
    return f"{name}.".startswith(("pycuda.", "ikpy.backends.cuda.driver."))


@contextmanager
def installed() -> Iterator[types.ModuleType]:
    """pycuda.driver in sys.modules."""
    driver = types.ModuleType("pycuda.driver")
    for name, value in globals().items():
        if not name.startswith("_"):
            setattr(driver, name, value)
    driver.Context = FakeContext  # type: ignore[attr-defined]
    driver.MemoryError = OutOfMemory  # type: ignore[attr-defined]
    driver.init = lambda flags=0: None  # type: ignore[attr-defined]
    driver.module_from_buffer = Module  # type: ignore[attr-defined]
    package = types.ModuleType("pycuda")
    package.driver = driver  # type: ignore[attr-defined]
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_replaced(name)}
    sys.modules.update({"pycuda": package, "pycuda.driver": driver})
    try:
        yield driver
    finally:
        for name in list(filter(_is_replaced, sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)
        stack.contexts.clear()
        live.clear()
