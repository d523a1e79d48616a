"""A GPU through PyCUDA: its context, kernels and memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pycuda.driver as cuda

from ikpy.backends.cuda import nvml
from ikpy.backends.cuda.api import Device, DeviceError, Event, MemoryInfo, Stream, aligned, too_little
from ikpy.backends.cuda.driver import library
from ikpy.backends.cuda.driver.streams import CudaEvent, CudaStream, PinnedMemory
from ikpy.backends.cuda.peers import arrives
from ikpy.signals.held_interrupts import held_back

# If static and dynamic shared memory of a block are more than this, the dynamic one must be asked for per function.
DEFAULT_SHARED_BYTES = 48 << 10
# The management library counts memory that the driver reserves.
WHOLE = 1.25

# Compute capability and names of kernels -> cubin that holds each of them.
CubinLoader = Callable[[tuple[int, int], Collection[str]], Mapping[str, Path]]
_log = logging.getLogger(__name__)
# .device: whose context is current in a thread.
_thread = threading.local()
_opening = threading.RLock()


def _meet(one: CudaDevice, other: CudaDevice) -> None:
    """Lets copies between two devices go directly if they arrive so; a line of the log says where they do not."""
    reasons = [reason for reason in (one.enable_peer(other), other.enable_peer(one)) if reason]
    if not reasons and not (arrives(one, other) and arrives(other, one)):
        one.disable_peer(other)
        other.disable_peer(one)
        reasons = ["direct ones do not arrive as they were sent (an IOMMU or PCIe ACS may be in the way)"]
    if reasons:
        _log.warning("copies between %s and %s go through host memory: %s", one.name, other.name, reasons[0])


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
        library.keep(self._context)
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
                    self.lost = library.loaded().cuCtxSynchronize() in library.LOST
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
                library.keep(self._modules[path])
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
        except cuda.MemoryError as error:
            nbytes = path.stat().st_size
            raise too_little(self, nbytes, f"the kernels of {path.name}", cuda.mem_get_info()[0]) from error
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
        library.keep(allocation)
        self._allocations[int(allocation)] = allocation
        return int(allocation)

    def release(self, address: int) -> None:
        """Waits for everything on the device; a device that is lost gives nothing back before the process ends."""
        if self.lost:
            return
        with self.current():
            allocation = self._allocations.pop(address)
            allocation.free()
            library.give_back(allocation)

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
