"""What a context keeps on one device: caches, inputs, compute memory, streams."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

import numpy as np

from ikpy.backends.cuda import staging
from ikpy.backends.cuda.api import Device, DeviceError, Event, LaunchLike, aligned
from ikpy.backends.cuda.inputs import Block, InputMemory
from ikpy.backends.cuda.memory import Rows, WeightStore, fill_host, host_parts
from ikpy.backends.cuda.staging import Log, Part, StagingRing
from ikpy.backends.cuda.state_memory import DeviceStates
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.planner import Arena
from ikpy.signals.held_interrupts import Held


class AddressOf(Protocol):
    """Device address of the first element of a value."""

    def __call__(self, value: Value) -> int: ...


class Kernels(Protocol):
    """What the kernels offer: the package launch, or a double in tests."""

    def supports(self, node: Node) -> str | None:
        """Why a node must run on the CPU, or None."""

    def lower(self, node: Node, address: AddressOf, runtime: int, scratch: int) -> list[LaunchLike]:
        """Launches of a node; runtime and scratch are addresses of the scalars and of work memory."""

    def joined(self, first: Node, second: Node) -> Node | None:
        """One node for two that follow each other on a device, or None."""

    def merged(self, launches: Iterable[LaunchLike]) -> list[LaunchLike]:
        """What does the same as these launches, one after the other."""

    def scratch_bytes(self, node: Node) -> int:
        """Work memory that the launches of a node need."""

    def activation_format(self, node: Node) -> int:
        """Format of the activations that a product reads on a device."""

    def prepared_nbytes(self, node: Node) -> int:
        """Bytes of the activations that an act_prepare node makes on a device."""


class WeightSlot:
    """Memory for weights that are uploaded for one node. ready: the copy is done; free: the node is done."""

    def __init__(self, device: Device) -> None:
        self.block = Block(device, "weights that are uploaded for one product")
        self.ready: Event = device.new_event()
        self.free: Event = device.new_event()


class DeviceState:
    """Memory and streams of a context on one device."""

    def __init__(self, device: Device, weights: WeightStore, inputs: InputMemory, log: Log) -> None:
        self.device = device
        self.weights = weights
        self._log = log
        self._ring: StagingRing | None = None
        self.stream = device.new_stream()
        self.copy_stream = device.new_weight_stream()
        self.uploaded = device.new_event()
        self.arena = Block(device, "intermediate values")
        self.scratch = Block(device, "work memory of kernels")
        self.slots = [WeightSlot(device), WeightSlot(device)]
        self._next_slot = 0
        self._directions = Block(device, "control vectors")
        self._steering: np.ndarray | None = None
        # Whether launches are captured as CUDA graphs.
        self.graphs = True
        self._caches: dict[str, tuple[int, Buffer]] = {}
        self._mirrored: list[str] = []
        self._copies: set[str] = set()
        self.inputs = inputs

    def go_without_graphs(self, reason: DeviceError) -> None:
        """From now on kernels are launched one by one."""
        self.graphs = False
        self._log(f"warning: kernels are launched one by one, which is slower: {reason}")

    # inputs

    @property
    def runtime(self) -> int:
        """Address of the run-time scalars."""
        return self.inputs.block.address

    def upload_inputs(self, n_kv: int) -> None:
        """Starts the copy of the run-time scalars and the inputs."""
        self.inputs.upload(self.stream, n_kv, self.uploaded)

    def set_directions(self, directions: np.ndarray) -> None:
        """Copies control vectors, which change so rarely that they are no part of the inputs of a run."""
        self._directions.reserve(directions.nbytes)
        self._steering = directions
        self.stream.upload(self._directions.address, directions)
        self.stream.synchronize()

    # caches

    def add_caches(
        self, buffers: Iterable[Buffer], *, mirrored: bool, copies: Collection[Buffer] = frozenset()
    ) -> None:
        """Allocates caches, filled with zeros. mirrored: the host has copies of them, to be read and written there;
        copies: those that it takes from another device.
        """
        for buffer in buffers:
            address = self.device.alloc(buffer.nbytes, buffer.name)
            self._caches[buffer.name] = address, buffer
            self.stream.fill(address, 0, buffer.nbytes)
            if mirrored:
                self._mirrored.append(buffer.name)
            if buffer in copies:
                self._copies.add(buffer.name)

    def _mirrors(self) -> Iterator[tuple[int, Buffer]]:
        return (self._caches[name] for name in self._mirrored)

    def download_caches(self, wanted: Mapping[str, Rows] | None = None) -> None:
        """Makes the host's copies of the caches up to date; wanted: rows of whole caches by their names, if not all."""
        for address, buffer in self._mirrors():
            whole, _, _ = buffer.name.partition(" ")
            if buffer.name not in self._copies and (wanted is None or whole in wanted):
                fill_host(buffer, partial(self._download, address), None if wanted is None else wanted[whole])

    def _download(self, address: int, memory: np.ndarray, start: int) -> None:
        self.stream.download(memory, address + start)
        self.stream.synchronize()

    def upload_caches(self) -> None:
        """Takes the caches from the host's copies."""
        for address, buffer in self._mirrors():
            start = address
            for part in host_parts(buffer):
                self.stream.upload(start, part)
                self.stream.synchronize()
                start += part.nbytes

    def state_memory(self, state: Value, n_slots: int) -> DeviceStates:
        """The slots of a state tensor f32 [..., n_slots] that is on this device."""
        address, _ = self._caches[state.buffer.name]
        return DeviceStates(self.stream, address, state.n_elements // n_slots)

    # addresses

    def base(self, buffer: Buffer, arena: Arena) -> int:
        """Address of a buffer. Raises DeviceError for one that is not on this device."""
        if buffer.role == "value":
            if buffer in arena.offsets:
                return self.arena.address + arena.offsets[buffer]
        elif buffer.role == "weight":
            return self.weights.address(self.device, buffer)
        elif buffer.role == "cache" and buffer.name in self._caches:
            return self._caches[buffer.name][0]
        elif buffer.role == "input" and (offset := self.inputs.offset(buffer)) is not None:
            return self.runtime + offset
        elif self._steering is not None and buffer.address == self._steering.ctypes.data:
            return self._directions.address
        raise DeviceError(f"{self.device.name}: {buffer.role} {buffer.name} is not on the device")

    # weights

    def upload_weights(self, buffers: Collection[Buffer], slot_bytes: int, held: Held) -> None:
        """Uploads the weights that the device lacks. slot_bytes: of the largest weight that is uploaded when used."""
        missing = self.weights.missing(self.device, buffers)
        largest = max(slot_bytes, *(b.nbytes for b in missing), 0)
        if not largest:
            return
        chunk = min(staging.CHUNK, aligned(largest))
        if self._ring is None or self._ring.chunk < chunk:
            self.copy_stream.synchronize()
            self._ring = None
            self._ring = StagingRing(self.device, self._log, chunk)
        self.weights.upload(self.device, missing, self._ring, self.copy_stream, self._log, held)
        if not slot_bytes:
            self._ring = None

    def fill_slot(self, slot: WeightSlot, parts: Iterable[Part]) -> None:
        """Copies weights to a slot, behind its last use; the stream goes on when they are there."""
        assert self._ring is not None
        self.copy_stream.wait(slot.free)
        self._ring.copy(self.copy_stream, parts)
        self.copy_stream.record(slot.ready)
        self.stream.wait(slot.ready)

    def next_slot(self) -> WeightSlot:
        """The slot for the next upload: the two take turns."""
        self._next_slot ^= 1
        return self.slots[self._next_slot]

    def drain(self) -> None:
        """Waits for everything on the device, whatever became of the host's work."""
        self.copy_stream.synchronize()
        self.stream.synchronize()

    def release(self) -> None:
        """Gives all memory of the context back."""
        self.drain()
        blocks = self.arena, self.scratch, self._directions, self.inputs.block
        for block in (*blocks, *(slot.block for slot in self.slots)):
            block.release()
        for address, _ in self._caches.values():
            self.device.release(address)
        self._caches.clear()
