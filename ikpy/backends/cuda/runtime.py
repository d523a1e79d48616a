"""Runs the graphs of a context on devices: placement of nodes, memory of every device, plans."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from ikpy.backends.cuda.api import Device, DeviceError, DeviceMemoryError, aligned
from ikpy.backends.cuda.inputs import Block, ContextInputs, InputMemory, Inputs, input_bytes
from ikpy.backends.cuda.memory import Rows
from ikpy.backends.cuda.plan import HybridPlan, Told
from ikpy.backends.cuda.setup import DeviceSetup
from ikpy.backends.cuda.staging import pinned_or_pageable
from ikpy.backends.cuda.state import DeviceState
from ikpy.backends.cuda.state_memory import DeviceStates
from ikpy.graph.assign import Assignment, DeviceRules, Step, assign, read, written
from ikpy.graph.divide import Divider
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.placement import CPU
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.split import SplitGraph, split_graph
from ikpy.signals.held_interrupts import held_back

Log = Callable[[str], None]
N_SLOTS = 2
ALIGNMENT = 64
# An address for launches that are never started.
NOWHERE = 1 << 20
MIB = 1 << 20


@dataclass
class DeviceNeeds:
    """Bytes that a context takes on a device, and the kernels it launches.

    slot: the largest weight that is uploaded when it is used. directions: control vectors.
    """

    weights: dict[str, Buffer] = field(default_factory=dict)
    cache: int = 0
    inputs: int = 0
    arena: int = 0
    scratch: int = 0
    slot: int = 0
    directions: int = 0
    kernels: set[str] = field(default_factory=set)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that stay on the device."""
        return sum(aligned(b.nbytes) for b in self.weights.values())

    @property
    def compute_bytes(self) -> int:
        """Bytes of everything that is neither weight nor cache."""
        return self.inputs + self.arena + self.scratch + N_SLOTS * self.slot + self.directions

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weight_bytes + self.cache + self.compute_bytes


class DeviceRuntime:
    """The devices of one context. caches, states: (layer, name) -> tensor of the KV cache, of recurrent states.

    plan_only: memory is measured, not taken.
    """

    def __init__(
        self,
        setup: DeviceSetup,
        inputs: Inputs,
        caches: dict[tuple[int, str], Value],
        states: dict[tuple[int, str], Value],
        log: Log,
        *,
        plan_only: bool = False,
    ) -> None:
        self.setup = setup
        self.plan_only = plan_only
        self._log = log
        self._caches = caches
        self._states = states
        self._inputs = inputs
        self._rules = DeviceRules(
            setup.placement,
            {v.buffer.name: setup.placement.caches[layer] for (layer, _), v in (caches | states).items()},
            lambda node, device: setup.kernels_on(device).supports(node),
            lambda node, device: setup.kernels_on(device).activation_format(node),
            lambda node, device: setup.kernels_on(device).prepared_nbytes(node),
            setup.params.offload_batch,
            setup.params.policy,
        )
        self._divider = Divider(setup.placement, self._rules.runs)
        self.needs = {d.name: DeviceNeeds(inputs=input_bytes(inputs)) for d in setup.devices}
        self.states: dict[str, DeviceState] = {}
        self._noted: Counter[tuple[str, str]] = Counter()
        self._finalizer = weakref.finalize(self, _release, self.states)
        # At exit the driver frees everything, perhaps before us.
        self._finalizer.atexit = False

    # placement

    def settle(self, graphs: Sequence[list[Node]]) -> None:
        """Decides where the caches are, from the graphs that will use them.

        What an op reads and writes that has no kernel on its device stays in host memory, where the op runs, and with a
        cache all that some op needs together with it.
        """
        devices = dict(self._rules.cache_devices)
        users = [(node, names) for nodes in graphs for node in nodes if (names := _cache_names(node))]
        for node, names in users:
            for name in names:
                reason = self.setup.kernels_on(devices[name]).supports(node)
                if devices[name] != CPU and reason is not None:
                    self._log(f"llama_kv_cache_init: {name} stays in host memory: {node.kind}: {reason}")
                    devices[name] = CPU
        moved = True
        while moved:
            apart = [names for _, names in users if len({devices[name] == CPU for name in names}) > 1]
            devices |= dict.fromkeys((name for names in apart for name in names), CPU)
            moved = bool(apart)
        self._rules.cache_devices = devices
        self._divide_caches(graphs)
        for device in self.setup.devices:
            buffers = [*self._on(device, self._caches), *self._on(device, self._states)]
            self.needs[device.name].cache = sum(aligned(b.nbytes) for b in buffers)

    def _divide_caches(self, graphs: Sequence[list[Node]]) -> None:
        """Parts the caches of the layers whose attention several devices share."""
        where, layers = self._rules.cache_devices, {layer for layer, _ in self._caches}
        caches = {il: _buffers(v for (layer, _), v in self._caches.items() if layer == il) for il in layers}
        on_devices = {il: b for il, b in caches.items() if all(where[buffer.name] != CPU for buffer in b)}
        for note in self._divider.settle(graphs, on_devices):
            self._log(f"llama_kv_cache_init: {note}")

    def _held(self, cache: Buffer) -> list[tuple[str, Buffer]]:
        """Where a cache or state is: its parts or copies with their devices, or all of it."""
        return self._divider.cache_parts(cache) or [(self._rules.cache_devices[cache.name], cache)]

    def _copies(self) -> set[Buffer]:
        """Caches that another device has as well, and that the host takes from that one."""
        caches = _buffers(self._caches.values())
        return {b for cache in caches for _, b in self._held(cache)[1:] if b.gather is None}

    def _on(self, device: Device, tensors: Mapping[tuple[int, str], Value]) -> list[Buffer]:
        held = [item for buffer in _buffers(tensors.values()) for item in self._held(buffer)]
        return [buffer for name, buffer in held if name == device.name]

    def cache_bytes(self) -> dict[str, int]:
        """Bytes of caches in host memory and on each device, for those that hold any."""
        return self._bytes(self._caches)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of recurrent states in host memory and on each device, for those that hold any."""
        return self._bytes(self._states)

    def _bytes(self, tensors: Mapping[tuple[int, str], Value]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for device, buffer in (item for each in _buffers(tensors.values()) for item in self._held(each)):
            sizes[device] = sizes.get(device, 0) + buffer.nbytes
        return dict(sorted(sizes.items(), key=lambda item: (item[0] != CPU, item[0])))

    def split(self, nodes: list[Node], results: set[Buffer]) -> SplitGraph:
        """Decides where every node runs."""
        divided = self._divider.run(nodes)
        assignment = assign(divided.nodes, self._rules, divided.devices)
        self._note_fallbacks(assignment)
        return split_graph(self._joined(assignment.steps), results, divided.results)

    def _joined(self, steps: list[Step]) -> list[Step]:
        """Steps with pairs that a device can carry out at once made one.

        Results that several devices make for themselves stay steps of their own.
        """
        makers = Counter(v.buffer for step in steps for v in written(step.node))
        found: list[Step] = []
        for step in steps:
            last = found[-1] if found else None
            alone = all(makers[v.buffer] == 1 for v in written(step.node))
            if last is not None and last.device == step.device != CPU and alone:
                one = self.setup.kernels_on(step.device).joined(last.node, step.node)
                if one is not None:
                    found[-1] = Step(step.device, one)
                    continue
            found.append(step)
        return found

    def _note_fallbacks(self, assignment: Assignment) -> None:
        for key, count in assignment.fallbacks.items():
            if key not in self._noted:
                reason, kind = key
                self._log(f"note: {count} {kind} nodes of layers on a device run on the CPU: {reason}")
            self._noted[key] += count

    # memory

    def measure(self, graph: SplitGraph, inputs: int = 0) -> None:
        """Adds the memory that a graph needs, and that its inputs do; commit() makes room for all that was measured."""
        for name in graph.devices:
            needs, steps, kernels = self.needs[name], graph.steps(name), self.setup.kernels_on(name)
            needs.inputs = max(needs.inputs, inputs)
            resident, slot_bytes = _weights(steps)
            needs.weights.update((b.name, b) for b in resident)
            needs.arena = max(needs.arena, graph.arenas[name].nbytes)
            needs.scratch = max(needs.scratch, *(kernels.scratch_bytes(s.node) for s in steps))
            needs.slot = max(needs.slot, slot_bytes)

    def measure_kernels(self, graph: SplitGraph) -> None:
        """Adds the kernels of a graph; commit() loads them. Those of other graphs are loaded when they are compiled."""
        for name in [] if self.plan_only else graph.devices:
            self.needs[name].kernels |= self._kernel_names(name, graph.steps(name))

    def _kernel_names(self, device: str, steps: Iterable[Step]) -> set[str]:
        """Kernels that the steps launch, whatever the addresses will be."""
        lower = self.setup.kernels_on(device).lower
        # Most layers are alike.
        different = {_signature(step.node): step.node for step in steps}.values()
        return {launch.kernel for node in different for launch in lower(node, lambda _: NOWHERE, NOWHERE, NOWHERE)}

    def commit(self) -> bool:
        """Uploads weights and allocates memory as measured; True if compiled plans became invalid.

        Raises DeviceError before anything is uploaded if a device has too little memory.
        """
        if self.plan_only:
            return False
        with held_back() as held:
            if not self.states:
                self._make_states()
            # Kernels and memory first: what is missing is known before gigabytes were uploaded.
            for name, state in self.states.items():
                state.device.prepare(self.needs[name].kernels)
            moved = self._reserve()
            for name, state in self.states.items():
                state.upload_weights(list(self.needs[name].weights.values()), self.needs[name].slot, held)
        return moved

    def grow(self, graph: SplitGraph, inputs: int = 0) -> bool:
        """Makes room for a graph of a shape that was not measured; True if compiled plans became invalid.

        After a DeviceError they are invalid as well, and what was measured before still has its room.
        """
        before = {name: replace(needs, weights=dict(needs.weights)) for name, needs in self.needs.items()}
        self.measure(graph, inputs)
        try:
            return self.commit()
        except DeviceError:
            self.needs = before
            raise

    def _reserve(self) -> bool:
        """Makes room for compute memory; True if anything moved."""
        wanted: list[tuple[Block, int]] = []
        for name, state in self.states.items():
            needs = self.needs[name]
            wanted += [(state.inputs.block, needs.inputs), (state.arena, needs.arena), (state.scratch, needs.scratch)]
            wanted += [(slot.block, needs.slot) for slot in state.slots]
        grown = [(block, nbytes) for block, nbytes in wanted if nbytes > block.nbytes]
        if grown:
            self._drain()
        for block, nbytes in grown:
            block.reserve(nbytes)
        return bool(grown)

    def _drain(self) -> None:
        """Waits for all devices: what the last run did not wait for, as without results, uses memory that is to go."""
        for state in self.states.values():
            state.drain()

    def _remedy(self, device: Device) -> str:
        """What helps where a device has too little memory."""
        remedy = (
            "offload fewer layers (-ngl), keep more experts on the CPU (-ncmoe), use a smaller -c or -ub, or let --fit "
            "choose"
        )
        taken = self.setup.taken.get(device.name, 0)
        return f"{remedy}; the projector has {taken / MIB:.0f} MiB there (--no-mmproj-offload)" if taken else remedy

    def _make_states(self) -> None:
        for device in self.setup.devices:
            needs = self.needs[device.name]
            missing = self.setup.weights.missing(device, needs.weights.values())
            weights = sum(aligned(b.nbytes) for b in missing)
            wanted, free = weights + needs.cache + needs.compute_bytes, device.memory().free
            if wanted > free:
                sizes = {"weights": weights, "cache": needs.cache, "compute": needs.compute_bytes}
                parts = ", ".join(f"{name} {nbytes / MIB:.0f}" for name, nbytes in sizes.items())
                raise DeviceMemoryError(
                    f"{device.name}: failed to allocate buffer: {wanted / MIB:.0f} MiB are needed ({parts}), "
                    f"{free / MIB:.0f} MiB are free; {self._remedy(device)}"
                )
        for device in self.setup.devices:
            self.states[device.name] = state = DeviceState(
                device, self.setup.weights, self.input_memory(device), self._log
            )
            state.add_caches(self._on(device, self._caches), mirrored=True, copies=self._copies())
            state.add_caches(self._on(device, self._states), mirrored=False)

    def input_memory(self, device: Device) -> InputMemory:
        """Memory for the inputs on a device."""
        return ContextInputs(device, self._inputs, self._log)

    def host_memory(self, nbytes: int) -> np.ndarray:
        """Host memory uint8 [nbytes] that is copied without delay, at a multiple of 64; what it replaces may go."""
        self._drain()
        memory = pinned_or_pageable(self.setup.devices[0], nbytes + ALIGNMENT, self._log)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]

    def compile(
        self, graph: SplitGraph, cpu_plan: CompiledPlan | None, arena_address: int, told: Mapping[Buffer, Told]
    ) -> HybridPlan:
        """Binds a graph whose memory was committed. Parameters as of HybridPlan."""
        setup = self.setup
        return HybridPlan(graph, cpu_plan, self.states, setup.kernels_on, arena_address, setup.params, told)

    def set_directions(self, directions: np.ndarray) -> None:
        """Copies control vectors, which graphs read as an input, to all devices."""
        for needs in self.needs.values():
            needs.directions = max(needs.directions, directions.nbytes)
        for state in self.states.values():
            state.set_directions(directions)

    def state_memory(self, n_slots: int) -> dict[tuple[int, str], DeviceStates]:
        """The slots of the recurrent states that are on devices, whose memory was taken."""
        where = self._rules.cache_devices
        return {
            key: self.states[where[value.buffer.name]].state_memory(value, n_slots)
            for key, value in self._states.items()
            if where[value.buffer.name] != CPU
        }

    # caches as host memory

    def download_caches(self, wanted: Mapping[str, Rows] | None = None) -> None:
        """Makes the cache tensors in host memory the same as on the devices; wanted: rows of these buffers, if not
        all."""
        for state in self.states.values():
            state.download_caches(wanted)

    def upload_caches(self) -> None:
        """Takes the caches of the devices from the tensors in host memory."""
        for state in self.states.values():
            state.upload_caches()

    def release(self) -> None:
        """Gives the context's device memory back; it is given back with the context at the latest."""
        self._finalizer()


def _release(states: dict[str, DeviceState]) -> None:
    # No device may still write to another one.
    for state in states.values():
        with suppress(DeviceError):
            state.drain()
    for state in states.values():
        with suppress(DeviceError):  # a device that failed frees nothing before the process ends
            state.release()
    states.clear()


def _buffers(values: Iterable[Value]) -> list[Buffer]:
    """Of tensors, some of which may lie in one."""
    return list(dict.fromkeys(value.buffer for value in values))


def _cache_names(node: Node) -> set[str]:
    """Caches and states that a node reads or writes."""
    return {v.buffer.name for v in (*read(node), *written(node)) if v.buffer.role == "cache"}


def _signature(node: Node) -> tuple:
    """All of a node that its launches depend on, but the addresses."""
    buffers: dict[Buffer, int] = {}
    places = [
        v and (v.type_id, v.shape, v.strides, v.offset, v.dynamic_dim, buffers.setdefault(v.buffer, len(buffers)))
        for v in (node.dst, *node.src)
    ]
    return node.kind, *node.ip, *node.fp, *places


def _weights(steps: Iterable[Step]) -> tuple[list[Buffer], int]:
    """Weights that steps need on their device, and the bytes of the largest one that is uploaded when used."""
    resident: dict[Buffer, None] = {}
    largest = 0
    for step in steps:
        uploaded = {v.buffer for v in step.uploads}
        largest = max(largest, *(b.nbytes for b in uploaded), 0)
        for value in read(step.node):
            if value.buffer.role == "weight" and value.buffer not in uploaded:
                resident[value.buffer] = None
    return list(resident), largest
