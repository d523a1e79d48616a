"""Devices emulated in host memory: the whole path of placement, splits, copies and launches without a GPU.

Device memory lies in mappings of its own, filled with 0xFF (NaN in every float type), so that a copy that was forgotten
shows. Streams run as late as they may: nothing happens before the host or another stream waits for it, so that a
missing wait shows as well. What must not happen too early, or before another stream has come so far, shows in other
orders (`Turns`).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

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
from ikpy.backends.cuda.launch.limits import shared_fault

POISON = b"\xff"
LATE, EARLY = 0, 1
Launcher = Callable[[LaunchLike], None]


def kernel_launcher() -> Launcher:
    """Launches the CUDA kernels as compiled for the host."""
    from ikpy.backends.cuda.emulator import library

    emulator = library()

    def launch(launch: LaunchLike) -> None:
        emulator.launch(launch.kernel, launch.grid, launch.block, launch.shared_bytes, launch.args)

    return launch


class Turns:
    """When the streams of some devices go on, beside when they are waited for.

    order: LATE, never; EARLY, whenever something is issued; or the seed of an order in which some run ahead and others
    stay behind, for a while.
    """

    def __init__(self, order: int = LATE) -> None:
        self._order = order
        self._random = random.Random(order)
        self._streams: list[weakref.ref[EmulatedStream]] = []
        self._leader: weakref.ref[EmulatedStream] | None = None

    def join(self, stream: EmulatedStream) -> None:
        """Makes a stream one of those that take turns."""
        self._streams = [each for each in self._streams if each() is not None]
        self._streams.append(weakref.ref(stream))

    def go_on(self, issued: EmulatedStream) -> None:
        """Lets streams go on after something was issued on one of them."""
        if self._order == LATE:
            return
        if self._order == EARLY:
            issued.run_until(issued.issued)
            return
        if self._random.random() < 0.25:
            self._leader = self._random.choice([None, *self._streams])
        leader = self._leader() if self._leader else None
        if leader is not None:
            leader.run_until(leader.done + self._random.randrange(4))


class EmulatedGraph(Graph):
    """The captured launches."""

    def __init__(self, launches: list[LaunchLike]) -> None:
        self.launches = launches


class EmulatedEvent(Event):
    """A serial number of a stream of its device."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.stream: EmulatedStream | None = None
        self.serial = 0

    def synchronize(self) -> None:
        """Runs the stream up to the point."""
        if self.stream is not None:
            self.stream.run_until(self.serial)


class EmulatedStream(Stream):
    """A queue of operations that runs when somebody waits."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self._queue: deque[Callable[[], None]] = deque()
        self.issued = 0
        self.done = 0
        self._captured: list[LaunchLike] | None = None
        device.turns.join(self)

    def _enqueue(self, operation: Callable[[], None]) -> None:
        if self._captured is not None:
            raise DeviceError("only launches can be captured in a graph")
        self._queue.append(operation)
        self.issued += 1
        self.device.turns.go_on(self)

    def run_until(self, serial: int) -> None:
        """Executes operations up to this number."""
        while self.done < serial and self._queue:
            operation = self._queue.popleft()
            self.done += 1
            operation()

    def upload(self, target: int, source: np.ndarray) -> None:
        """Raises DeviceError for memory that is not the device's, and for arrays with gaps."""
        _check_contiguous(source)
        self.device.check(target, source.nbytes)
        start, nbytes = self.device.host_memory(source), source.nbytes
        self._enqueue(lambda: _move(target, start(), nbytes))

    def download(self, target: np.ndarray, source: int) -> None:
        """As upload."""
        _check_contiguous(target)
        self.device.check(source, target.nbytes)
        start, nbytes = self.device.host_memory(target), target.nbytes
        self._enqueue(lambda: _move(start(), source, nbytes))

    def send(self, other: Device, target: int, source: int, nbytes: int) -> None:
        """Both ranges are checked."""
        self.device.check(source, nbytes)
        assert isinstance(other, EmulatedDevice)
        other.check(target, nbytes)
        self._enqueue(lambda: _move(target, source, nbytes))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Both ranges are checked."""
        self.device.check(source, nbytes)
        self.device.check(target, nbytes)
        self._enqueue(lambda: _move(target, source, nbytes))

    def fill(self, target: int, byte: int, nbytes: int) -> None:
        """The range is checked."""
        self.device.check(target, nbytes)
        self._enqueue(lambda: _fill(target, byte, nbytes))

    def launch(self, launch: LaunchLike) -> None:
        """Raises DeviceError for more shared memory than the device has; other faults show when the stream runs."""
        fault = shared_fault(launch.shared_bytes, self.device.compute_capability)
        if fault:
            raise DeviceError(f"{self.device.name}: kernel {launch.kernel}: {fault}")
        if self._captured is not None:
            self._captured.append(launch)
            return
        self._enqueue(lambda: self.device.launcher(launch))

    def record(self, event: Event) -> None:
        """Raises DeviceError for an event of another device."""
        assert isinstance(event, EmulatedEvent)
        if event.device is not self.device:
            raise DeviceError(f"{self.device.name}: an event of {event.device.name} cannot be recorded")
        event.stream, event.serial = self, self.issued

    def wait(self, event: Event) -> None:
        """Runs the other stream when this one gets there."""
        assert isinstance(event, EmulatedEvent)
        other, serial = event.stream, event.serial
        if other is not None and other is not self:
            self._enqueue(lambda: other.run_until(serial))

    def synchronize(self) -> None:
        """Runs everything that was issued."""
        if self._captured is not None:
            raise DeviceError("a stream that is captured cannot be waited for")
        self.run_until(self.issued)

    def milliseconds(self, issue: Callable[[], None]) -> float:
        """By the device's clock, which says how long each launch is said to take."""
        graph = self.capture(issue)
        self.replay(graph)
        self.synchronize()
        assert isinstance(graph, EmulatedGraph)
        return sum(self.device.clock(launch) for launch in graph.launches)

    def capture(self, issue: Callable[[], None]) -> Graph:
        """Raises DeviceError for anything but launches."""
        self._captured = []
        try:
            issue()
            return EmulatedGraph(self._captured)
        finally:
            self._captured = None

    def replay(self, graph: Graph) -> None:
        """Issues the launches again."""
        assert isinstance(graph, EmulatedGraph)
        for launch in graph.launches:
            self.launch(launch)


class EmulatedDevice(Device):
    """A device whose kernels run on the host. launcher: None means the compiled CUDA kernels.

    clock: milliseconds that a launch is said to take; one per thousand blocks by default. turns: of this device's
    streams and of others that are given the same.
    """

    def __init__(
        self,
        index: int,
        total_bytes: int,
        launcher: Launcher | None = None,
        *,
        compute_capability: tuple[int, int] = (8, 0),
        clock: Callable[[LaunchLike], float] = lambda launch: math.prod(launch.grid) / 1000,
        turns: Turns | None = None,
    ) -> None:
        super().__init__(index, "emulated", compute_capability)
        self.total_bytes = total_bytes
        self.clock = clock
        self.turns = turns or Turns()
        self._launcher = launcher
        self._memory: dict[int, mmap.mmap] = {}
        self._pinned: list[weakref.ref[np.ndarray]] = []
        self._used = 0

    @property
    def launcher(self) -> Launcher:
        """Runs one launch now; the kernels are compiled on first use."""
        if self._launcher is None:
            self._launcher = kernel_launcher()
        return self._launcher

    def memory(self) -> MemoryInfo:
        """What alloc has not taken of total_bytes."""
        return MemoryInfo(self.total_bytes - self._used, self.total_bytes)

    def alloc(self, nbytes: int, purpose: str = "data") -> int:
        """A mapping of its own, filled with NaN."""
        size = aligned(nbytes)
        if self._used + size > self.total_bytes:
            raise too_little(self, nbytes, purpose, self.total_bytes - self._used)
        region = mmap.mmap(-1, size)
        region.write(POISON * size)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(region))
        self._memory[address] = region
        self._used += size
        return address

    def release(self, address: int) -> None:
        """Raises KeyError for what is not allocated."""
        region = self._memory.pop(address)
        self._used -= len(region)

    def ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of all memory that was allocated."""
        return [(start, len(region)) for start, region in self._memory.items()]

    def check(self, address: int, nbytes: int) -> None:
        """Raises DeviceError unless the range lies in memory of this device."""
        if any(start <= address and address + nbytes <= start + size for start, size in self.ranges()):
            return
        raise DeviceError(f"{self.name}: {nbytes} bytes at {address:#x} are not memory of this device")

    def new_stream(self) -> Stream:
        """A queue of this device."""
        return EmulatedStream(self)

    def new_event(self) -> Event:
        """An event that counts as reached."""
        return EmulatedEvent(self)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Ordinary memory; it must not go before the copies from and to it are done."""
        memory = np.zeros(nbytes, np.uint8)
        self._pinned = [each for each in self._pinned if each() is not None]
        self._pinned.append(weakref.ref(memory))
        return memory

    def host_memory(self, array: np.ndarray) -> Callable[[], int]:
        """The address of a host array when it is copied. Memory that is not pinned lives until then: drivers copy it
        before they return.

        Raises DeviceError then for pinned memory that was given back.
        """
        owner, address = array, array.ctypes.data
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        found = next((each for each in self._pinned if each() is owner), None)
        if found is None:
            return lambda: array.ctypes.data

        def start() -> int:
            if found() is None:
                raise DeviceError(f"{self.name}: pinned memory was given back before a copy of it was done")
            return address

        return start


def _check_contiguous(array: np.ndarray) -> None:
    if not array.flags.c_contiguous:
        raise DeviceError("copies need contiguous host arrays")


def _move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def _fill(target: int, byte: int, nbytes: int) -> None:
    ctypes.memset(target, byte, nbytes)
