"""What a device can do. driver.py implements it over PyCUDA, emulated.py in host memory.

Addresses are integers, lengths are bytes. Everything on a stream is asynchronous and in order; host arrays given to a
stream must stay untouched until the stream or an event behind the operation has been waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np

from ikpy.errors import OutOfMemoryError, ResourceError

ALIGNMENT = 256
MIB = 1 << 20


class DeviceError(ResourceError):
    """A device failed, or has too little memory."""


class DeviceMemoryError(DeviceError, OutOfMemoryError):
    """A device has too little free memory."""


class LaunchLike(Protocol):
    """A kernel launch: name, grid and block sizes, bytes of dynamic shared memory, one packed value per argument."""

    @property
    def kernel(self) -> str: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...
    @property
    def block(self) -> tuple[int, int, int]: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def args(self) -> Sequence[bytes]: ...


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
        """Copies a contiguous host array to the device."""

    @abstractmethod
    def download(self, target: np.ndarray, source: int) -> None:
        """Fills a contiguous host array from the device."""

    @abstractmethod
    def send(self, other: Device, target: int, source: int, nbytes: int) -> None:
        """Copies to memory of another device."""

    @abstractmethod
    def fill(self, target: int, byte: int, nbytes: int) -> None:
        """Sets device memory."""

    @abstractmethod
    def launch(self, launch: LaunchLike) -> None:
        """Starts a kernel."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Sets the event to this point."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Holds back what follows until the event, of any device, is reached."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until everything so far is done."""

    @abstractmethod
    def milliseconds(self, issue: Callable[[], None]) -> float:
        """Time that the device takes for the launches of issue(); waits for their end."""

    @abstractmethod
    def capture(self, issue: Callable[[], None]) -> Graph:
        """What issue() launches on this stream, not executed but kept for replay."""

    @abstractmethod
    def replay(self, graph: Graph) -> None:
        """Starts a captured graph."""


class Device(ABC):
    """One GPU. name: CUDA0, CUDA1, ... in buffer names and log lines; description: what it is."""

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
        """Address of fresh memory, aligned to ALIGNMENT; whole multiples of that are taken: kernels read whole words.

        Raises DeviceMemoryError, which names the purpose, when there is too little.
        """

    @abstractmethod
    def release(self, address: int) -> None:
        """Gives memory back."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream of its own."""

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
