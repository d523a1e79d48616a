"""Weights on devices: uploaded once per model, whatever number of contexts use them."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from ikpy.backends.cuda.api import Device, DeviceError, Stream, aligned
from ikpy.backends.cuda.staging import Part, StagingRing
from ikpy.graph.ir import Buffer, Gather
from ikpy.signals.held_interrupts import Held

Log = Callable[[str], None]
MIB = 1 << 20
# Seconds between two lines about an upload under way.
REPORT_INTERVAL = 5.0
# Bytes of parts of weights that are put together in pageable memory at once.
GATHERED = 16 << 20
Key = tuple[str, int, Gather | None]
Rows = Sequence[tuple[int, int]]
"""First and end, in bytes of a whole cache, of the rows of some cells."""


def host_view(address: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes] over host memory that somebody else keeps alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def host_parts(buffer: Buffer) -> Iterator[np.ndarray]:
    """The bytes of a weight in order, uint8: a view, or copies of at most GATHERED bytes where they lie apart."""
    assert buffer.address is not None
    gather = buffer.gather
    if gather is None:
        yield host_view(buffer.address, buffer.nbytes)
        return
    end = max(start + length for start, length in gather.ranges)
    data = host_view(buffer.address, gather.stride * (gather.count - 1) + end)
    rows = np.lib.stride_tricks.as_strided(data, (gather.count, end), (gather.stride, 1))
    step = max(1, GATHERED * gather.count // buffer.nbytes)
    for first in range(0, gather.count, step):
        pieces = [rows[first : first + step, start : start + length] for start, length in gather.ranges]
        # A single range of one row is a view, of any size.
        yield np.concatenate(pieces, axis=1).reshape(-1) if len(pieces) > 1 else pieces[0].reshape(-1)


def fill_host(buffer: Buffer, read: Callable[[np.ndarray, int], None], rows: Rows | None = None) -> None:
    """Fills what a buffer with a single range is a copy of. read(memory, start): puts its bytes from start on there.

    rows: first and end, in bytes of the whole memory, of the rows that are wanted, if not all.
    """
    assert buffer.address is not None
    gather = buffer.gather
    if gather is None:
        for first, end in [(0, buffer.nbytes)] if rows is None else rows:
            read(host_view(buffer.address + first, end - first), first)
        return
    wanted = [(0, gather.count)] if rows is None else [(a // gather.stride, b // gather.stride) for a, b in rows]
    ((start, length),) = gather.ranges
    data = host_view(buffer.address, gather.stride * (gather.count - 1) + start + length)
    held = np.lib.stride_tricks.as_strided(data[start:], (gather.count, length), (gather.stride, 1))
    step = max(1, GATHERED // length)
    for first, end in ((i, min(i + step, b)) for a, b in wanted for i in range(a, b, step)):
        part = np.empty((end - first, length), np.uint8)
        read(part.reshape(-1), first * length)
        held[first:end] = part


def host_bytes(buffer: Buffer) -> np.ndarray:
    """All bytes of a weight, uint8 [nbytes]; a copy of what lies apart."""
    parts = list(host_parts(buffer))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _Progress:
    """Says now and then how far an upload is, and how fast it was."""

    def __init__(self, device: Device, total: int, log: Log) -> None:
        self._name, self._total, self._log = device.name, total, log
        self._done = 0
        self._began = self._told = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._told >= REPORT_INTERVAL:
            self._told = now
            share = f"{100 * self._done / self._total:.0f} % of {self._total / MIB:.2f} MiB"
            self._log(f"llm_load_tensors: {self._name}: uploading weights: {share} ({self._speed(now)})")

    def finish(self) -> None:
        """The last line."""
        speed = self._speed(time.monotonic())
        self._log(f"llm_load_tensors: {self._name}: uploaded {self._total / MIB:.2f} MiB of weights ({speed})")

    def _speed(self, now: float) -> str:
        return f"{self._done / MIB / max(now - self._began, 1e-6):.0f} MiB/s"


class WeightStore:
    """Device addresses of weights; the memory is given back with the store."""

    def __init__(self) -> None:
        self._told: list[Callable[[Buffer], None]] = []
        self._addresses: dict[Key, int] = {}
        self._blocks: list[tuple[Device, int]] = []
        # Nothing else may come to lie where an uploaded weight is in host memory.
        self._owners: list[object] = []
        finalizer = weakref.finalize(self, _release, self._blocks)
        # At exit the driver frees everything, perhaps before us.
        finalizer.atexit = False

    def when_uploaded(self, told: Callable[[Buffer], None]) -> None:
        """Calls a function with every weight that is on a device and whose host memory was only read for that."""
        self._told.append(told)

    def _uploaded(self, buffer: Buffer) -> None:
        for told in self._told:
            told(buffer)

    def missing(self, device: Device, buffers: Iterable[Buffer]) -> list[Buffer]:
        """Those of the weights that are not on the device, each once."""
        found: dict[Key, Buffer] = {}
        for buffer in buffers:
            key = _key(device, buffer)
            if key not in self._addresses:
                found[key] = buffer
        return list(found.values())

    def upload(
        self, device: Device, buffers: Iterable[Buffer], ring: StagingRing, stream: Stream, log: Log, held: Held
    ) -> None:
        """Uploads the weights that are missing on the device; an interrupt that is held back ends it."""
        wanted = self.missing(device, buffers)
        if not wanted:
            return
        total = sum(aligned(b.nbytes) for b in wanted)
        block = device.alloc(total, f"{len(wanted)} weights")
        progress = _Progress(device, sum(b.nbytes for b in wanted), log)
        addresses: dict[Key, int] = {}

        def parts() -> Iterator[Part]:
            address = block
            for buffer in wanted:
                held.deliver()
                at = address
                for part in host_parts(buffer):
                    yield at, part
                    at += part.nbytes
                addresses[_key(device, buffer)] = address
                address += aligned(buffer.nbytes)

        try:
            ring.copy(stream, parts(), _Arrivals(wanted, self._uploaded, progress))
            stream.synchronize()
        except BaseException:
            with suppress(DeviceError):  # the first error is the one to tell
                stream.synchronize()
            _release([(device, block)])
            raise
        self._blocks.append((device, block))
        self._addresses |= addresses
        self._owners += [buffer.owner for buffer in wanted]
        progress.finish()

    def address(self, device: Device, buffer: Buffer) -> int:
        """Device address of a weight. Raises DeviceError if it was not uploaded."""
        try:
            return self._addresses[_key(device, buffer)]
        except KeyError:
            raise DeviceError(f"{device.name}: {buffer.name or 'a tensor'} was not uploaded") from None


def _key(device: Device, buffer: Buffer) -> Key:
    assert buffer.address is not None
    return device.name, buffer.address, buffer.gather


class _Arrivals:
    """Turns bytes that were read, in the order of the weights, into weights that were read."""

    def __init__(self, wanted: Iterable[Buffer], read: Callable[[Buffer], None], progress: Callable[[int], None]):
        self._wanted = iter(wanted)
        self._read, self._progress = read, progress
        self._current = next(self._wanted, None)
        self._bytes = 0

    def __call__(self, nbytes: int) -> None:
        self._bytes += nbytes
        while self._current is not None and self._bytes >= self._current.nbytes:
            self._bytes -= self._current.nbytes
            self._read(self._current)
            self._current = next(self._wanted, None)
        self._progress(nbytes)


def _release(blocks: list[tuple[Device, int]]) -> None:
    for device, address in blocks:
        with suppress(DeviceError):  # a device that failed frees nothing before the process ends
            device.release(address)
    blocks.clear()
