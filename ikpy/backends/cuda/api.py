"""What a device can do. The package driver implements it over PyCUDA, emulated.py in host memory.

Addresses are integers, lengths are bytes. Everything on a stream is asynchronous and in order; host arrays given to a
stream must stay alive and untouched until the stream or an event behind the operation has been waited for.

Any thread may use a device and what was made of it, but a stream belongs to one thread at a time. All calls raise
DeviceError for what the device refuses, and for what an earlier kernel did: the device then takes nothing more of this
process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from ikpy.errors import OutOfMemoryError, ResourceError

ALIGNMENT = 256
MIB = 1 << 20


class DeviceError(ResourceError):
    """A device failed, or has too little memory."""


class DeviceMemoryError(DeviceError, OutOfMemoryError):
    """A device has too little free memory."""


class LaunchLike(Protocol):
    """A kernel launch."""

    @property
    def kernel(self) -> str:
        """Name of the kernel."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks along x, y and z."""

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block along x, y and z."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""

    @property
    def args(self) -> Sequence[bytes]:
        """A packed value per argument."""


class MemoryInfo(NamedTuple):
    """Bytes of device memory."""

    free: int
    total: int


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until everything before the point is done."""


class Graph:
    """Captured launches that can be replayed as one; what it holds is the stream's matter."""


class Stream(ABC):
    """Operations of one device, executed in order."""

    @abstractmethod
    def upload(self, target: int, source: np.ndarray) -> None:
        """Copies a contiguous host array, all of its bytes, to an address of this stream's device."""

    @abstractmethod
    def download(self, target: np.ndarray, source: int) -> None:
        """Fills a contiguous host array, all of its bytes, from an address of this stream's device."""

    @abstractmethod
    def send(self, other: Device, target: int, source: int, nbytes: int) -> None:
        """Copies from this stream's device to memory of another one, whose streams know nothing of it: wait for it."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies within this stream's device; the ranges have no byte in common."""

    @abstractmethod
    def fill(self, target: int, byte: int, nbytes: int) -> None:
        """Sets every byte of a range of device memory."""

    @abstractmethod
    def launch(self, launch: LaunchLike) -> None:
        """Starts a kernel; raises DeviceError for one that there is not, and for sizes that the device refuses."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Sets an event of the same device to this point; where it was before is forgotten."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Holds back what follows until the event, of any device, is reached."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until everything so far is done; errors of kernels show here at the latest."""

    @abstractmethod
    def milliseconds(self, issue: Callable[[], None]) -> float:
        """Time that the device takes for the launches of issue(); waits for their end."""

    @abstractmethod
    def capture(self, issue: Callable[[], None]) -> Graph:
        """What issue() launches on this stream, not executed but kept for replay. Only launches can be captured."""

    @abstractmethod
    def replay(self, graph: Graph) -> None:
        """Starts a graph that was captured on this device, with the arguments it was captured with."""


class Device(ABC):
    """One GPU. name: CUDA0, CUDA1, ... in buffer names and log lines; description: what it is.

    is_remote: it is the memory and processors of another machine. kernels: what runs there, if not the CUDA kernels.
    """

    is_remote = False
    kernels: Any = None

    def __init__(self, index: int, description: str, compute_capability: tuple[int, int]) -> None:
        self.index = index
        self.name = f"CUDA{index}"
        self.description = description
        self.compute_capability = compute_capability

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Free and total memory now. A device in use takes some for itself; this makes it one in use."""

    def memory_estimate(self) -> MemoryInfo:
        """The same as far as it is known without taking the device into use."""
        return self.memory()

    @abstractmethod
    def alloc(self, nbytes: int, purpose: str = "data") -> int:
        """Address of fresh memory, aligned to ALIGNMENT; whole multiples are taken, as kernels read 16 bytes at once.

        Raises DeviceMemoryError, which names the purpose, when there is too little.
        """

    @abstractmethod
    def release(self, address: int) -> None:
        """Gives back what alloc returned; everything that uses it must be done."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream of its own, which lives as long as it is referred to."""

    def new_weight_stream(self) -> Stream:
        """A stream that weights are copied on."""
        return self.new_stream()

    @abstractmethod
    def new_event(self) -> Event:
        """An event; one that was never recorded counts as reached."""

    def session(self) -> AbstractContextManager[None]:
        """Many operations of this thread on this device: what each of them would do first is done once."""
        return nullcontext()

    def prepare(self, kernels: Collection[str]) -> None:
        """Makes kernels ready to be launched; what this does not name is loaded when it is first launched."""
        return

    def software(self) -> str:
        """Version of what runs the kernels, such as the driver."""
        return ""

    @abstractmethod
    def pinned(self, nbytes: int) -> np.ndarray:
        """Host memory, uint8 [nbytes], that copies to and from devices run fastest with.

        Raises DeviceError where the system does not lock that much.
        """

    def __repr__(self) -> str:
        return f"{self.name} ({self.description})"


def too_little(device: Device, nbytes: int, purpose: str, free: int) -> DeviceMemoryError:
    """The error of an allocation."""
    return DeviceMemoryError(
        f"{device.name}: failed to allocate buffer of {nbytes / MIB:.2f} MiB for {purpose}: {free / MIB:.2f} MiB are "
        "free; offload fewer layers (-ngl), keep more experts on the CPU (-ncmoe) or use a smaller -c or -ub"
    )


def aligned(nbytes: int) -> int:
    """nbytes rounded up to the alignment of device memory."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
