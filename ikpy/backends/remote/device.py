"""A host as a device of the runtime: memory by address, one stream of operations, programs instead of kernels."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable
from functools import cache

import numpy as np

from ikpy.backends.cuda.api import (
    MIB,
    Device,
    DeviceError,
    DeviceMemoryError,
    Event,
    Graph,
    LaunchLike,
    MemoryInfo,
    Stream,
    aligned,
)
from ikpy.backends.remote.connection import Connection
from ikpy.backends.remote.kernels import NodeLaunch, Program, RemoteKernels
from ikpy.backends.remote.protocol import MAX_PAYLOAD, Message, address, divided

CACHED = 64 << 10
"""Bytes from which on a piece of weights is looked for in the host's cache."""


class RemoteEvent(Event):
    """What has been asked for up to a point; data that is sent is copied or sent at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.serial = 0

    def synchronize(self) -> None:
        """Reads the answers up to the point."""
        self._connection.settle(self.serial)


class RemoteStream(Stream):
    """All streams of a host are one connection, in whose order everything happens. caches: uploads are weights."""

    def __init__(self, device: RemoteDevice, *, caches: bool = False) -> None:
        self._device, self._connection = device, device.connection
        self._caches = caches

    def upload(self, target: int, source: np.ndarray) -> None:
        """Sends the bytes, or only their SHA-256 where the host has kept them."""
        data = source.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), MAX_PAYLOAD):
            piece = data[start : start + MAX_PAYLOAD]
            if self._caches and len(piece) >= CACHED:
                self._upload_cached(target + start, piece)
            else:
                self._connection.post(Message.UPLOAD, target + start, payload=piece)

    def _upload_cached(self, target: int, piece: memoryview) -> None:
        digest = hashlib.sha256(piece).digest()
        if self._connection.ask(1, Message.HAS, target, len(piece), payload=digest)[0]:
            return
        self._connection.post(Message.UPLOAD, target, payload=piece)
        self._connection.post(Message.KEEP, target, len(piece), payload=digest)

    def download(self, target: np.ndarray, source: int) -> None:
        """Asks for the bytes."""
        data = target.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), MAX_PAYLOAD):
            piece = data[start : start + MAX_PAYLOAD]
            self._connection.request(piece, Message.DOWNLOAD, source + start, len(piece))

    def send(self, other: Device, target: int, source: int, nbytes: int) -> None:
        """By way of this machine."""
        data = np.empty(nbytes, np.uint8)
        self.download(data, source)
        self.synchronize()
        stream = other.new_stream()
        stream.upload(target, data)
        stream.synchronize()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Within the host."""
        self._connection.post(Message.COPY, target, source, nbytes)

    def fill(self, target: int, byte: int, nbytes: int) -> None:
        """Within the host."""
        self._connection.post(Message.FILL, target, byte, nbytes)

    def launch(self, launch: LaunchLike) -> None:
        """Runs a program, which is sent when it first runs."""
        program = Program([launch]) if isinstance(launch, NodeLaunch) else launch
        assert isinstance(program, Program)
        if not program.number:
            self._device.send_program(program)
        self._connection.post(Message.RUN, program.number)

    def record(self, event: Event) -> None:
        """The point behind everything so far."""
        assert isinstance(event, RemoteEvent)
        event.serial = self._connection.requested

    def wait(self, event: Event) -> None:
        """Events of this host are in order; others are waited for here."""
        if not isinstance(event, RemoteEvent):
            event.synchronize()

    def synchronize(self) -> None:
        """Waits until the host has done everything, and raises what went wrong there."""
        self._connection.synchronize()

    def milliseconds(self, issue: Callable[[], None]) -> float:
        """Not measured."""
        raise DeviceError(f"{self._device.name}: the time of single launches is not measured on other machines")

    def capture(self, issue: Callable[[], None]) -> Graph:
        """Programs are captured already."""
        raise DeviceError(f"{self._device.name}: programs are no graphs")

    def replay(self, graph: Graph) -> None:
        """As capture."""
        raise DeviceError(f"{self._device.name}: programs are no graphs")


class RemoteDevice(Device):
    """The memory and processors of a host. index: behind the devices of this machine."""

    is_remote = True

    def __init__(self, index: int, host: str, port: int) -> None:
        name = f"RPC[{host}:{port}]"
        self.connection = Connection(host, port, name)
        said = self.connection.host
        super().__init__(index, f"{said.get('isa', '?')}, {said.get('threads', '?')} threads", (0, 0))
        self.name = name
        self._numbers = itertools.count(1)
        self._caches = bool(said.get("cache"))
        self.kernels = RemoteKernels(cache(self._activation_format), cache(self._activation_nbytes))

    def _activation_format(self, type_id: int, n_rows: int, by_expert: bool) -> int:
        answer = self.connection.ask(4, Message.FORMAT, type_id, n_rows, int(by_expert))
        return int(answer.view("<i4")[0])

    def _activation_nbytes(self, sizes: tuple[int, ...]) -> int:
        answer = self.connection.ask(8, Message.PREPARED, payload=np.array(sizes, "<i8").tobytes())
        return int(answer.view("<u8")[0])

    def memory(self) -> MemoryInfo:
        """What the host lends."""
        free, total = self.connection.ask(16, Message.MEMORY).view("<u8").tolist()
        return MemoryInfo(free, total)

    def alloc(self, nbytes: int, purpose: str = "data") -> int:
        """Raises DeviceMemoryError where the host lends less."""
        number = next(self._numbers)
        size, free = aligned(nbytes), self.connection.ask(9, Message.ALLOC, number, aligned(nbytes))
        if not free[0]:
            left = int(free[1:].copy().view("<u8")[0])
            raise DeviceMemoryError(
                f"{self.name}: failed to allocate {size / MIB:.2f} MiB for {purpose}: the host lends {left / MIB:.2f} "
                "MiB more (its -m); put fewer layers there (-ngl, -ts) or use a smaller -c or -ub"
            )
        return address(number)

    def release(self, where: int) -> None:
        """Said with the next message."""
        self.connection.post_later(Message.FREE, divided(where)[0])

    def send_program(self, program: Program) -> None:
        """Makes a program known to the host, as long as it is referred to here."""
        program.number = next(self._numbers)
        self.connection.post(Message.PROGRAM, program.number, program.runtime, payload=program.records())
        finalizer = weakref.finalize(program, self.connection.post_later, Message.DROP, program.number)
        finalizer.atexit = False

    def new_stream(self) -> Stream:
        """The connection."""
        return RemoteStream(self)

    def new_weight_stream(self) -> Stream:
        """The connection, with the host's cache of weights if it has one."""
        return RemoteStream(self, caches=self._caches)

    def new_event(self) -> Event:
        """An event that counts as reached."""
        return RemoteEvent(self.connection)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Ordinary memory."""
        return np.zeros(nbytes, np.uint8)
