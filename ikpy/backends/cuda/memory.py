"""Weights on devices: uploaded once per model, whatever number of contexts use them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable

import numpy as np

from ikpy.backends.cuda.api import Device, DeviceError, Stream, aligned
from ikpy.graph.ir import Buffer

CHUNK = 64 << 20


def host_view(address: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes] over host memory that somebody else keeps alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class PinnedUploader:
    """Copies pageable memory through two pinned buffers: one is filled while the other is on its way."""

    def __init__(self, device: Device, stream: Stream, chunk: int = CHUNK) -> None:
        self._stream = stream
        self._buffers = [device.pinned(chunk) for _ in range(2)]
        self._events = [device.new_event() for _ in range(2)]
        self._next = 0
        self._chunk = chunk

    def upload(self, target: int, source: np.ndarray) -> None:
        """Copies source to the device; returns when source may change, before the last chunk has arrived."""
        for start in range(0, source.nbytes, self._chunk):
            part = source[start : start + self._chunk]
            buffer, event = self._buffers[self._next], self._events[self._next]
            event.synchronize()
            buffer[: part.nbytes] = part
            self._stream.upload(target + start, buffer[: part.nbytes])
            self._stream.record(event)
            self._next ^= 1


class WeightStore:
    """Device addresses of weights; the memory is given back with the store."""

    def __init__(self) -> None:
        self._addresses: dict[tuple[str, int], int] = {}
        self._blocks: list[tuple[Device, int]] = []
        # Nothing else may come to lie where an uploaded weight is in host memory.
        self._owners: list[object] = []
        finalizer = weakref.finalize(self, _release, self._blocks)
        # At exit the driver frees everything, perhaps before us.
        finalizer.atexit = False

    def missing(self, device: Device, buffers: Iterable[Buffer]) -> list[Buffer]:
        """Those of the weights that are not on the device, each once."""
        found: dict[int, Buffer] = {}
        for buffer in buffers:
            assert buffer.address is not None
            if (device.name, buffer.address) not in self._addresses:
                found[buffer.address] = buffer
        return list(found.values())

    def upload(self, device: Device, buffers: Iterable[Buffer]) -> int:
        """Uploads the weights that are missing on the device; returns their bytes."""
        wanted = self.missing(device, buffers)
        total = sum(aligned(b.nbytes) for b in wanted)
        if not total:
            return 0
        address = device.alloc(total)
        self._blocks.append((device, address))
        stream = device.new_stream()
        largest = max(b.nbytes for b in wanted)
        uploader = PinnedUploader(device, stream, min(CHUNK, largest))
        for buffer in wanted:
            assert buffer.address is not None
            uploader.upload(address, host_view(buffer.address, buffer.nbytes))
            self._addresses[device.name, buffer.address] = address
            self._owners.append(buffer.owner)
            address += aligned(buffer.nbytes)
        stream.synchronize()
        return total

    def address(self, device: Device, buffer: Buffer) -> int:
        """Device address of a weight. Raises DeviceError if it was not uploaded."""
        assert buffer.address is not None
        try:
            return self._addresses[device.name, buffer.address]
        except KeyError:
            raise DeviceError(f"{device.name}: {buffer.name or 'a tensor'} was not uploaded") from None


def _release(blocks: list[tuple[Device, int]]) -> None:
    for device, address in blocks:
        device.release(address)
    blocks.clear()
