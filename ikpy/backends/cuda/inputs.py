"""What graphs read that the host writes: arrays that are copied to a device before every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ikpy.backends.cuda.api import Device, DeviceError, Event, Stream, aligned
from ikpy.backends.cuda.staging import Log, pinned_or_pageable
from ikpy.graph.ir import Buffer

# Room for run-time scalars in front of the inputs; the first one is n_kv.
RUNTIME_BYTES = 256
# Bytes between changes that are sent along with them, as a message of its own takes as many.
NEAR = 64


@dataclass
class Inputs:
    """Arrays of a context that graphs read.

    batch: written before every run. cells, windows: positions and sequences of the cache cells, of which few change;
    a run looks at the first n_kv entries of those in cells, and at all of windows.
    """

    batch: Sequence[np.ndarray] = field(default_factory=list)
    cells: Sequence[np.ndarray] = field(default_factory=list)
    windows: Sequence[np.ndarray] = field(default_factory=list)

    @property
    def arrays(self) -> list[np.ndarray]:
        """All of them."""
        return [*self.batch, *self.cells, *self.windows]


def input_bytes(inputs: Inputs) -> int:
    """Bytes of the run-time scalars and the inputs on a device."""
    return bytes_of(inputs.arrays)


def bytes_of(arrays: Sequence[np.ndarray]) -> int:
    """Bytes of the run-time scalars and of arrays behind them on a device."""
    return RUNTIME_BYTES + sum(aligned(array.nbytes) for array in arrays)


def offsets_of(arrays: Sequence[np.ndarray]) -> dict[int, int]:
    """Where arrays lie behind the run-time scalars, by their address in host memory."""
    found, end = {}, RUNTIME_BYTES
    for array in arrays:
        found[array.ctypes.data] = end
        end += aligned(array.nbytes)
    return found


class Block:
    """Device memory that grows when more is asked for; its address changes then."""

    def __init__(self, device: Device, purpose: str) -> None:
        self._device, self._purpose = device, purpose
        self.nbytes = 0
        self.address = 0

    def reserve(self, nbytes: int) -> bool:
        """Makes room; True if the address changed. After a DeviceError it may have changed too, with the old size."""
        if nbytes <= self.nbytes:
            return False
        before = self.nbytes
        self.release()
        try:
            self._take(nbytes)
        except DeviceError:
            self._take(before)
            raise
        return True

    def _take(self, nbytes: int) -> None:
        if nbytes:
            self.address, self.nbytes = self._device.alloc(nbytes, self._purpose), nbytes

    def release(self) -> None:
        """Gives the memory back."""
        if self.nbytes:
            self._device.release(self.address)
        self.nbytes = self.address = 0


class InputMemory(Protocol):
    """Inputs on a device. block: the run-time scalars, and the inputs behind them."""

    block: Block

    def offset(self, buffer: Buffer) -> int | None:
        """Where an input lies in the block, None if it does not."""

    def upload(self, stream: Stream, n_kv: int, uploaded: Event) -> None:
        """Starts the copies; uploaded: they are done. What they read may be written again then."""


class ContextInputs:
    """One block: run-time scalars, the inputs of a batch, and behind them the arrays of the cells."""

    def __init__(self, device: Device, inputs: Inputs, log: Log) -> None:
        self._inputs = inputs
        self._offsets = offsets_of(inputs.arrays)
        self._batch_bytes = bytes_of(inputs.batch)
        self._staging = pinned_or_pageable(device, input_bytes(inputs), log)
        self.block = Block(device, "inputs")
        self.block.reserve(input_bytes(inputs))
        # Cells that no context has make the first comparison, of all cells, find all of them changed.
        self._staging[:] = 0x80
        self._reach = max(map(len, inputs.cells))
        self._sends_changes = device.is_remote
        self._sent: np.ndarray | None = None

    def offset(self, buffer: Buffer) -> int | None:
        """Where an input lies in the block, None if it does not."""
        return None if buffer.address is None else self._offsets.get(buffer.address)

    def _staged(self, array: np.ndarray) -> tuple[int, np.ndarray]:
        start = self._offsets[array.ctypes.data]
        return start, self._staging[start : start + array.nbytes]

    def upload(self, stream: Stream, n_kv: int, uploaded: Event) -> None:
        """Starts the copy of the run-time scalars, of the batch, and of the cells that changed.

        Cells behind n_kv are empty, on the device too, where they may have been in use: some ops look at all.
        """
        # Earlier copies read the staging memory, and those of the last run read host buffers that this run fills.
        uploaded.synchronize()
        self._staging[:8].view(np.int64)[0] = n_kv
        for array in self._inputs.batch:
            self._staged(array)[1][:] = array.view(np.uint8)
        for array in self._inputs.cells:
            self._upload_changes(stream, array, max(n_kv, self._reach))
        self._reach = n_kv
        for array in self._inputs.windows:
            self._upload_changes(stream, array, len(array))
        self._upload_batch(stream)
        stream.record(uploaded)

    def _upload_batch(self, stream: Stream) -> None:
        """All of the run-time scalars and the batch, or, to another machine, what changed: memory for the largest batch
        is mostly the same.
        """
        current = self._staging[: self._batch_bytes]
        if not self._sends_changes:
            stream.upload(self.block.address, current)
            return
        before = ~current if self._sent is None else self._sent
        changed = np.flatnonzero(current.view(np.int64) != before.view(np.int64)) * 8
        for span in np.split(changed, np.flatnonzero(np.diff(changed) > NEAR) + 1):
            if len(span):
                first, last = int(span[0]), int(span[-1]) + 8
                stream.upload(self.block.address + first, current[first:last])
        self._sent = current.copy()

    def _upload_changes(self, stream: Stream, array: np.ndarray, n: int) -> None:
        """Of the first n entries, an even number."""
        start, known = self._staged(array)
        current = array[:n].view(np.uint8)
        known = known[: len(current)]
        changed = np.flatnonzero(known.view(np.int64) != current.view(np.int64))
        if not len(changed):
            return
        first, last = int(changed[0]) * 8, int(changed[-1]) * 8 + 8
        known[first:last] = current[first:last]
        stream.upload(self.block.address + start + first, known[first:last])


class ChangingInputs:
    """Inputs of graphs that take turns: those of one at a time lie in the block, whatever its size was made for."""

    def __init__(self, device: Device) -> None:
        self.block = Block(device, "inputs")
        self._changing: Sequence[np.ndarray] = ()
        self._constant: Sequence[np.ndarray] = ()
        self._offsets: dict[int, int] = {}
        self._address = 0
        self._scalars = np.zeros(RUNTIME_BYTES, np.uint8)

    def place(self, changing: Sequence[np.ndarray], constant: Sequence[np.ndarray]) -> None:
        """These are the inputs from now on; constant: the same in every run. They stay alive as long as they are."""
        if constant is not self._constant:
            self._address = 0
        self._changing, self._constant = changing, constant
        self._offsets = offsets_of([*changing, *constant])

    def offset(self, buffer: Buffer) -> int | None:
        """Where an input lies in the block, None if it does not."""
        return None if buffer.address is None else self._offsets.get(buffer.address)

    def upload(self, stream: Stream, n_kv: int, uploaded: Event) -> None:
        """Starts the copies, of the constant ones where they are not there yet."""
        uploaded.synchronize()
        self._scalars[:8].view(np.int64)[0] = n_kv
        stream.upload(self.block.address, self._scalars)
        news = self._changing if self._address == self.block.address else [*self._changing, *self._constant]
        for array in news:
            stream.upload(self.block.address + self._offsets[array.ctypes.data], array.reshape(-1).view(np.uint8))
        self._address = self.block.address
        stream.record(uploaded)
