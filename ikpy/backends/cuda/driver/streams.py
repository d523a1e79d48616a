"""Streams, events, CUDA graphs and pinned memory of a device."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pycuda.driver as cuda

from ikpy.backends.cuda.api import Device, DeviceError, Event, Graph, LaunchLike, Stream
from ikpy.backends.cuda.arguments import pack
from ikpy.backends.cuda.driver import library

if TYPE_CHECKING:
    from ikpy.backends.cuda.driver.device import CudaDevice

STREAM_NON_BLOCKING = 1
# Memory that Python's collector frees in the midst of a capture would end one of the stricter modes.
CAPTURE_RELAXED = 2


def destroyed_with(owner: object, device: CudaDevice, held: list[Any]) -> None:
    """Lets go of PyCUDA's objects when the owner dies, in whatever thread, with their context current.

    Without it PyCUDA would leak what dies in another thread than the one that made the context.
    """
    for thing in held:
        library.keep(thing)
    finalizer = weakref.finalize(owner, _let_go, device, held)
    # At exit the driver frees everything, perhaps before us.
    finalizer.atexit = False


def _let_go(device: CudaDevice, held: list[Any]) -> None:
    if device.lost:
        return
    with device.pushed():
        while held:
            library.give_back(held[-1])
            del held[-1]  # the last reference


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
        library.loaded().cuGraphExecDestroy(handle)


class PinnedMemory:
    """Page-locked host memory as an array's base: it lives as long as any view of that array."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        with device.current():
            try:
                array = cuda.pagelocked_empty(nbytes, np.uint8, mem_flags=cuda.host_alloc_flags.PORTABLE)
            except cuda.Error as error:
                raise DeviceError(f"{device.name}: {nbytes} bytes of host memory cannot be pinned: {error}") from error
        self.__array_interface__ = array.__array_interface__
        destroyed_with(self, device, [array])


class CudaEvent(Event):
    """An event without timing."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.current():
            self._held = [cuda.Event(cuda.event_flags.DISABLE_TIMING)]
        destroyed_with(self, device, self._held)

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
        destroyed_with(self, device, self._held)

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
        peer = cast("CudaDevice", other)
        with self.device.current():
            # PyCUDA's memcpy_peer_async takes the current context for those it is given (2026.1: a test is inverted).
            library.call(
                "cuMemcpyPeerAsync",
                *(ctypes.c_ulonglong(target), ctypes.c_void_p(peer.context.handle)),
                *(ctypes.c_ulonglong(source), ctypes.c_void_p(self.device.context.handle)),
                *(ctypes.c_size_t(nbytes), ctypes.c_void_p(self.stream.handle)),
            )

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """By the device itself."""
        with self.device.current():
            cuda.memcpy_dtod_async(target, source, nbytes, self.stream)

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
                    library.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
                finally:
                    library.loaded().cuGraphDestroy(graph)
            except (DeviceError, cuda.Error) as error:
                raise DeviceError(f"{self.device.name}: {error}; -cuda graphs=0 goes without CUDA graphs") from error
        return CudaGraph(self.device, executable)

    @staticmethod
    def _captured(stream: ctypes.c_void_p, issue: Callable[[], None]) -> ctypes.c_void_p:
        graph = ctypes.c_void_p()
        library.call("cuStreamBeginCapture_v2", stream, ctypes.c_int(CAPTURE_RELAXED))
        try:
            issue()
        except BaseException:
            # A stream that goes on capturing could not even be waited for.
            if not library.loaded().cuStreamEndCapture(stream, ctypes.byref(graph)) and graph:
                library.loaded().cuGraphDestroy(graph)
            raise
        library.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        return graph

    def replay(self, graph: Graph) -> None:
        """Arguments are those of the capture: what lies at the addresses may change, the addresses may not."""
        assert isinstance(graph, CudaGraph)
        with self.device.current():
            library.call("cuGraphLaunch", graph.handle, ctypes.c_void_p(self.stream.handle))
