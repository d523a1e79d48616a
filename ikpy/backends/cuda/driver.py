"""Devices through PyCUDA; the only file that imports it.

PyCUDA has no interface to CUDA graphs: capture and replay call the driver library on PyCUDA's stream handles.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pycuda.driver as cuda

from ikpy.backends.cuda import nvml
from ikpy.backends.cuda.api import (
    Device,
    DeviceError,
    Event,
    Graph,
    LaunchLike,
    MemoryInfo,
    Stream,
    aligned,
    too_little,
)
from ikpy.backends.cuda.arguments import pack
from ikpy.backends.cuda.interrupts import held_back
from ikpy.backends.cuda.peers import arrives

STREAM_NON_BLOCKING = 1
# Memory that Python's collector frees in the midst of a capture would end one of the stricter modes.
CAPTURE_RELAXED = 2
# If static and dynamic shared memory of a block are more than this, the dynamic one must be asked for per function.
DEFAULT_SHARED_BYTES = 48 << 10
# Errors that kernels leave: ECC, illegal address, timeout, assertion, hardware stack, illegal instruction, misaligned
# address, invalid address space, invalid program counter, launch failure.
LOST = frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719})
# The management library counts memory that the driver reserves.
WHOLE = 1.25

# Compute capability and names of kernels -> cubin that holds each of them.
CubinLoader = Callable[[tuple[int, int], Collection[str]], Mapping[str, Path]]
_log = logging.getLogger(__name__)
# .device: whose context is current in a thread.
_thread = threading.local()
_opening = threading.RLock()


def open_devices(cubins: CubinLoader) -> list[Device]:
    """All GPUs, none of which has a context before it is used. cubins: finds or compiles the kernels.

    Raises DeviceError if the driver does not start.
    """
    try:
        cuda.init()
        opened: list[CudaDevice] = []
        return [CudaDevice(i, cuda.Device(i), cubins, opened) for i in range(cuda.Device.count())]
    except cuda.Error as error:
        raise DeviceError(f"the CUDA driver does not start: {error}") from error


@cache
def _library() -> ctypes.CDLL:
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DeviceError("the CUDA driver library is not found")


def _call(name: str, *arguments: Any) -> None:
    """Calls the driver library; its errors are raised as PyCUDA raises them."""
    try:
        function = getattr(_library(), name)
    except AttributeError:
        major, minor = divmod(cuda.get_driver_version(), 1000)
        version = f"{major}.{minor // 10}"
        raise DeviceError(f"the driver, for CUDA {version}, has no {name}: 11.4 or later is needed") from None
    status = function(*arguments)
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise cuda.Error(f"{name} failed: {(text.value or b'unknown error').decode()} ({status})")


def _keep(thing: object) -> None:
    """Keeps an object of PyCUDA until _give_back, and at exit for good: the driver frees everything then.

    PyCUDA's destructors would warn of whatever another thread's context holds, and of every call that a GPU refuses.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _give_back(thing: object) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


def _destroyed_with(owner: object, device: CudaDevice, held: list[Any]) -> None:
    """Lets go of PyCUDA's objects when the owner dies, in whatever thread, with their context current.

    Without it PyCUDA would leak what dies in another thread than the one that made the context.
    """
    for thing in held:
        _keep(thing)
    finalizer = weakref.finalize(owner, _let_go, device, held)
    # At exit the driver frees everything, perhaps before us.
    finalizer.atexit = False


def _let_go(device: CudaDevice, held: list[Any]) -> None:
    if device.lost:
        return
    with device.pushed():
        while held:
            _give_back(held[-1])
            del held[-1]  # the last reference


def _meet(one: CudaDevice, other: CudaDevice) -> None:
    """Lets copies between two devices go directly if they arrive so; a line of the log says where they do not."""
    reasons = [reason for reason in (one.enable_peer(other), other.enable_peer(one)) if reason]
    if not reasons and not (arrives(one, other) and arrives(other, one)):
        one.disable_peer(other)
        other.disable_peer(one)
        reasons = ["direct ones do not arrive as they were sent (an IOMMU or PCIe ACS may be in the way)"]
    if reasons:
        _log.warning("copies between %s and %s go through host memory: %s", one.name, other.name, reasons[0])


class CudaGraph(Graph):
    """An instantiated CUDA graph."""

    def __init__(self, device: CudaDevice, handle: ctypes.c_void_p) -> None:
        self.handle = handle
        finalizer = weakref.finalize(self, _destroy_graph, device, handle)
        finalizer.atexit = False


def _destroy_graph(device: CudaDevice, handle: ctypes.c_void_p) -> None:
    if device.lost:
        return
    with device.pushed():
        _library().cuGraphExecDestroy(handle)


class PinnedMemory:
    """Page-locked host memory as an array's base: it lives as long as any view of that array."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        with device.current():
            try:
                array = cuda.pagelocked_empty(nbytes, np.uint8, mem_flags=cuda.host_alloc_flags.PORTABLE)
            except cuda.Error as error:
                raise DeviceError(f"{device.name}: {nbytes} bytes of host memory cannot be pinned: {error}") from error
        self.__array_interface__ = array.__array_interface__
        _destroyed_with(self, device, [array])


class CudaEvent(Event):
    """An event without timing."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.current():
            self._held = [cuda.Event(cuda.event_flags.DISABLE_TIMING)]
        _destroyed_with(self, device, self._held)

    @property
    def event(self) -> Any:
        """PyCUDA's event."""
        return self._held[0]

    def synchronize(self) -> None:
        """Blocks the host, without the interpreter lock; an event that was never recorded counts as reached."""
        with self._device.current():
            self.event.synchronize()


class CudaStream(Stream):
    """A stream that does not wait for the default stream."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        with device.current():
            self._held = [cuda.Stream(STREAM_NON_BLOCKING)]
        _destroyed_with(self, device, self._held)

    @property
    def stream(self) -> Any:
        """PyCUDA's stream."""
        return self._held[0]

    def upload(self, target: int, source: np.ndarray) -> None:
        """From pinned memory at once and later; from other memory the driver copies it before this returns."""
        with self.device.current():
            cuda.memcpy_htod_async(target, source, self.stream)

    def download(self, target: np.ndarray, source: int) -> None:
        """Into pinned memory later; with other memory this returns when it is there."""
        with self.device.current():
            cuda.memcpy_dtoh_async(target, source, self.stream)

    def send(self, other: Device, target: int, source: int, nbytes: int) -> None:
        """Directly where the devices have a way to each other; else the driver goes through memory of the host."""
        assert isinstance(other, CudaDevice)
        with self.device.current():
            # PyCUDA's memcpy_peer_async takes the current context for those it is given (2026.1: a test is inverted).
            _call(
                "cuMemcpyPeerAsync",
                *(ctypes.c_ulonglong(target), ctypes.c_void_p(other.context.handle)),
                *(ctypes.c_ulonglong(source), ctypes.c_void_p(self.device.context.handle)),
                *(ctypes.c_size_t(nbytes), ctypes.c_void_p(self.stream.handle)),
            )

    def fill(self, target: int, byte: int, nbytes: int) -> None:
        """By the device itself, at the speed of its memory."""
        with self.device.current():
            cuda.memset_d8_async(target, byte, nbytes, self.stream)

    def launch(self, launch: LaunchLike) -> None:
        """Loads the kernel if need be; blocks while a thousand launches wait. What a kernel does wrong shows later."""
        with self.device.current():
            try:
                function = self.device.function(launch.kernel, launch.shared_bytes)
                function._launch_kernel(launch.grid, launch.block, pack(launch.args), launch.shared_bytes, self.stream)
            except cuda.Error as error:
                raise DeviceError(
                    f"{self.device.name}: kernel {launch.kernel}, grid {launch.grid}, block {launch.block}, "
                    f"{launch.shared_bytes} bytes of shared memory: {error}"
                ) from error

    def record(self, event: Event) -> None:
        """Raises DeviceError for an event of another device."""
        assert isinstance(event, CudaEvent)
        with self.device.current():
            event.event.record(self.stream)

    def wait(self, event: Event) -> None:
        """The device waits, not the host."""
        assert isinstance(event, CudaEvent)
        with self.device.current():
            self.stream.wait_for_event(event.event)

    def synchronize(self) -> None:
        """Blocks the host, without the interpreter lock; the place where errors of kernels show."""
        with self.device.current():
            self.stream.synchronize()

    def milliseconds(self, issue: Callable[[], None]) -> float:
        """Measured by the device, between two events; resolution half a microsecond."""
        with self.device.current():
            start, end = cuda.Event(), cuda.Event()
            start.record(self.stream)
            issue()
            end.record(self.stream)
            end.synchronize()
            found = float(end.time_since(start))
            del start, end  # while their context is current
        return found

    def capture(self, issue: Callable[[], None]) -> Graph:
        """Kernels must have run once. After the DeviceError of a driver that makes no graph the stream can be used."""
        stream = ctypes.c_void_p(self.stream.handle)
        executable = ctypes.c_void_p()
        with self.device.current():
            try:
                graph = self._captured(stream, issue)
                try:
                    _call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
                finally:
                    _library().cuGraphDestroy(graph)
            except (DeviceError, cuda.Error) as error:
                raise DeviceError(f"{self.device.name}: {error}; -cuda graphs=0 goes without CUDA graphs") from error
        return CudaGraph(self.device, executable)

    @staticmethod
    def _captured(stream: ctypes.c_void_p, issue: Callable[[], None]) -> ctypes.c_void_p:
        graph = ctypes.c_void_p()
        _call("cuStreamBeginCapture_v2", stream, ctypes.c_int(CAPTURE_RELAXED))
        try:
            issue()
        except BaseException:
            # A stream that goes on capturing could not even be waited for.
            if not _library().cuStreamEndCapture(stream, ctypes.byref(graph)) and graph:
                _library().cuGraphDestroy(graph)
            raise
        _call("cuStreamEndCapture", stream, ctypes.byref(graph))
        return graph

    def replay(self, graph: Graph) -> None:
        """Arguments are those of the capture: what lies at the addresses may change, the addresses may not."""
        assert isinstance(graph, CudaGraph)
        with self.device.current():
            _call("cuGraphLaunch", graph.handle, ctypes.c_void_p(self.stream.handle))


class CudaDevice(Device):
    """A GPU with its primary context, made at its first use; kernels are loaded when first launched.

    opened: all devices of the process that have a context. lost: a kernel failed in such a way that the driver refuses
    everything until the process ends.
    """

    def __init__(self, index: int, device: Any, cubins: CubinLoader, opened: list[CudaDevice]) -> None:
        super().__init__(index, device.name(), device.compute_capability())
        self.handle = device
        self._opened = opened
        self.lost = False
        self._context: Any = None
        self._cubins = cubins
        # Models in several threads load kernels of one device.
        self._loading = threading.RLock()
        self._modules: dict[Path, Any] = {}
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}
        self._allocations: dict[int, Any] = {}

    @property
    def context(self) -> Any:
        """The primary context; it takes hundreds of MiB of the device from the first time on."""
        if self._context is None:
            with _opening:
                if self._context is None:
                    self._open()
        return self._context

    def _open(self) -> None:
        try:
            self._context = self.handle.retain_primary_context()
        except cuda.Error as error:
            raise DeviceError(f"{self.name}: the device cannot be used: {error}") from error
        _keep(self._context)
        for other in self._opened:
            _meet(self, other)
        self._opened.append(self)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device the current one of this thread; contexts belong to threads in CUDA.

        Errors of the driver, also those of earlier kernels, become DeviceError.
        """
        before = getattr(_thread, "device", None)
        try:
            if before is self:
                yield
                return
            # A context that an interrupt leaves on PyCUDA's stack makes it abort the process at exit.
            with held_back():
                context = self.context
                # The collector may run at any point, and what it finds looks at this.
                _thread.device = None
                context.push()
                _thread.device = self
                try:
                    yield
                finally:
                    _thread.device = None
                    cuda.Context.pop()
                    _thread.device = before
        except cuda.Error as error:
            remedy = "; a kernel failed before: the process must be started again" if self.lost else ""
            self._look_whether_lost()
            raise DeviceError(f"{self.name}: {error}{remedy}") from error

    def _look_whether_lost(self) -> None:
        if self._context is not None and not self.lost:
            try:
                with self.pushed():
                    self.lost = _library().cuCtxSynchronize() in LOST
            except cuda.Error:
                self.lost = True

    @contextmanager
    def pushed(self) -> Iterator[None]:
        """The context on top of whatever is current: for what is destroyed at any point of a thread."""
        with held_back():
            self.context.push()
            try:
                yield
            finally:
                cuda.Context.pop()

    def session(self) -> AbstractContextManager[None]:
        """The context stays current in this thread; other devices may be used inside."""
        return self.current()

    def enable_peer(self, other: CudaDevice) -> str:
        """Lets copies to the other device go directly; returns why they cannot, or an empty text."""
        try:
            with self.current():
                if not self.handle.can_access_peer(other.handle):
                    return "the hardware, or how it is connected, has no direct way"
                cuda.Context.enable_peer_access(other.context)
        except DeviceError as error:
            # Another library of the process may have done so.
            return "" if "already enabled" in str(error) else str(error)
        return ""

    def disable_peer(self, other: CudaDevice) -> None:
        """Lets copies to the other device go through host memory."""
        with self.current():
            cuda.Context.disable_peer_access(other.context)

    def function(self, name: str, shared_bytes: int) -> Any:
        """PyCUDA's function of a kernel, allowed this much dynamic shared memory; the device must be current.

        Raises cuda.Error where a block may not have that much, DeviceError where there is no such kernel.
        """
        if shared_bytes <= self._shared.get(name, -1):
            return self._functions[name]
        with self._loading:
            self.prepare([name])
            function = self._functions[name]
            if name not in self._shared:
                static = function.get_attribute(cuda.function_attribute.SHARED_SIZE_BYTES)
                self._shared[name] = max(0, DEFAULT_SHARED_BYTES - static)
            if shared_bytes > self._shared[name]:
                function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
                self._shared[name] = shared_bytes
        return function

    def prepare(self, kernels: Collection[str]) -> None:
        """Compiles and loads in the calling thread; others that want kernels of this device wait.

        Raises DeviceError where there is no compiler, or the driver does not take what it made.
        """
        with self._loading:
            wanted = set(kernels) - set(self._functions)
            if wanted:
                with self.current():
                    self._load(wanted)

    def _load(self, kernels: Collection[str]) -> None:
        for name, path in self._cubins(self.compute_capability, kernels).items():
            if path not in self._modules:
                self._modules[path] = self._module(path)
                _keep(self._modules[path])
            try:
                self._functions[name] = self._modules[path].get_function(name)
            except cuda.LogicError as error:
                self._look_whether_lost()
                if self.lost:
                    raise
                raise DeviceError(f"{self.name}: there is no kernel {name} in {path.name}") from error

    def _module(self, path: Path) -> Any:
        try:
            # PTX is text that ends with a zero.
            return cuda.module_from_buffer(path.read_bytes() + b"\0" * (path.suffix == ".ptx"))
        except cuda.Error as error:
            self._look_whether_lost()
            if self.lost:
                raise
            major, minor = divmod(cuda.get_driver_version(), 1000)
            raise DeviceError(
                f"{self.name}: the driver does not load {path}: {error}; the driver is for CUDA {major}.{minor // 10}: "
                "if the nvcc that compiled the kernels is newer, update the driver or name an older one with NVCC; "
                "`ikpy cuda build --force` compiles a damaged file again"
            ) from error

    def memory(self) -> MemoryInfo:
        """Makes the context if there is none, which takes some hundred MiB and a moment."""
        with self.current():
            return MemoryInfo(*cuda.mem_get_info())

    def memory_estimate(self) -> MemoryInfo:
        """Of the management library, before there is a context."""
        seen = None if self._context else nvml.memory_of(self.handle.pci_bus_id())
        # The library sees whole GPUs, also where this process has a slice of one.
        trusted = seen is not None and seen.total <= WHOLE * self.handle.total_memory()
        return seen if seen and trusted else self.memory()

    def alloc(self, nbytes: int, purpose: str = "data") -> int:
        """Waits for nothing; the address is valid in every thread."""
        with self.current():
            try:
                allocation = cuda.mem_alloc(aligned(nbytes))
            except cuda.MemoryError as error:
                raise too_little(self, nbytes, purpose, cuda.mem_get_info()[0]) from error
        _keep(allocation)
        self._allocations[int(allocation)] = allocation
        return int(allocation)

    def release(self, address: int) -> None:
        """Waits for everything on the device; a device that is lost gives nothing back before the process ends."""
        if self.lost:
            return
        with self.current():
            allocation = self._allocations.pop(address)
            allocation.free()
            _give_back(allocation)

    def new_stream(self) -> Stream:
        """Owned by the caller: it ends with the last reference, in any thread."""
        return CudaStream(self)

    def new_event(self) -> Event:
        """Without timing; owned by the caller as streams are."""
        return CudaEvent(self)

    def software(self) -> str:
        """CUDA version of the driver: 1000 x major + 10 x minor."""
        return str(cuda.get_driver_version())

    def pinned(self, nbytes: int) -> np.ndarray:
        """Pinned for all devices; given back with the last view of the array."""
        return np.asarray(PinnedMemory(self, nbytes))
