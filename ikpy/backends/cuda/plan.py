"""A split graph bound to memory: what the CPU runs, what is launched, and the copies and waits between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np

from ikpy.backends.cuda.api import DeviceError, Event, Graph, LaunchLike
from ikpy.backends.cuda.memory import host_view
from ikpy.backends.cuda.over_host import send_over_host
from ikpy.backends.cuda.state import DeviceState, Kernels
from ikpy.graph.assign import EXPERT_KINDS, Step, written
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.placement import CPU, DeviceParams
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.split import Split, SplitGraph, Transfer
from ikpy.signals.held_interrupts import held_back

# Fewer launches are started as fast one by one as through a graph.
SMALLEST_GRAPH = 3


class Run(NamedTuple):
    """What changes from run to run: attended cells, CPU threads and the CPU kernels' work memory."""

    n_kv: int
    n_threads: int
    work: Any  # core.WorkMemory


Operation = Callable[[Run], None]
Told = Callable[[np.ndarray], None]


class CpuRange:
    """Consecutive nodes on the CPU."""

    def __init__(self, plan: CompiledPlan, steps: list[Step], first: int) -> None:
        self._plan, self._steps, self._first = plan, steps, first

    def __call__(self, run: Run) -> None:
        self._plan.run(run.n_kv, run.n_threads, run.work, self._first, self._first + len(self._steps))

    def singly(self) -> Iterator[tuple[Step, Operation]]:
        """The same, one node at a time."""
        for i, step in enumerate(self._steps):
            yield step, CpuRange(self._plan, [step], self._first + i)


class LaunchRange:
    """Consecutive nodes on one device; from the second run on their launches are replayed as a CUDA graph.

    launches: of every node; merged: what carries out all of them.
    """

    def __init__(
        self,
        state: DeviceState,
        steps: list[Step],
        launches: list[list[LaunchLike]],
        merged: list[LaunchLike],
        *,
        capture: bool,
    ) -> None:
        self._state, self._steps, self._launches = state, steps, launches
        self._merged = merged
        self._capture = capture and len(merged) >= SMALLEST_GRAPH
        self._graph: Graph | None = None
        self._ran = False

    def _issue(self) -> None:
        for launch in self._merged:
            self._state.stream.launch(launch)

    def __call__(self, run: Run) -> None:
        # The first run loads kernels, which cannot happen during a capture.
        if self._graph is None and self._ran and self._capture and self._state.graphs:
            try:
                self._graph = self._state.stream.capture(self._issue)
            except DeviceError as error:
                self._state.go_without_graphs(error)
        self._ran = True
        if self._graph is None:
            self._issue()
        else:
            self._state.stream.replay(self._graph)

    def singly(self) -> Iterator[tuple[Step, Operation]]:
        """The same, one node at a time."""
        for step, launches in zip(self._steps, self._launches, strict=True):
            yield step, LaunchRange(self._state, [step], [launches], launches, capture=False)


class SingleStep:
    """One node with copies of its own."""

    def __init__(self, step: Step, operation: Operation) -> None:
        self._step, self._operation = step, operation

    def __call__(self, run: Run) -> None:
        self._operation(run)

    def singly(self) -> Iterator[tuple[Step, Operation]]:
        """The same."""
        yield self._step, self._operation


class HybridPlan:
    """Runs a split graph.

    kernels_on: those of a device by its name. cpu_plan: all nodes of the CPU in order. arena_address: the CPU's arena,
    where results lie at the end. told: gets to know the offsets [E + 1] of expert groups before experts are uploaded,
    by buffer of the groups.
    """

    def __init__(
        self,
        graph: SplitGraph,
        cpu_plan: CompiledPlan | None,
        states: Mapping[str, DeviceState],
        kernels_on: Callable[[str], Kernels],
        arena_address: int,
        params: DeviceParams,
        told: Mapping[Buffer, Told],
    ) -> None:
        self.graph = graph
        self.states = {name: states[name] for name in graph.devices}
        self._kernels_on = kernels_on
        self._params = params
        self._told = told
        self._arena_address = arena_address
        self._active: dict[Buffer, np.ndarray] = {}
        # When the copies that a CPU split (by identity) needs from a device are done.
        self._events: dict[tuple[str, int], Event] = {}
        self._cpu = cpu_plan
        self._cpu_done = 0
        self._operations: list[Operation] = []
        self._kernel_names: dict[str, set[str]] = {name: set() for name in self.states}
        for i, split in enumerate(graph.splits):
            if split.device == CPU:
                self._add_cpu(split)
            else:
                self._add_device(i, split)
        self._add_results()
        for name, state in self.states.items():
            state.device.prepare(self._kernel_names[name])

    # construction

    def _add_cpu(self, split: Split) -> None:
        for device in dict.fromkeys(t.source for t in split.transfers):
            self._add_wait(self.states[device], split)
        assert self._cpu is not None
        self._operations.append(CpuRange(self._cpu, split.steps, self._cpu_done))
        self._cpu_done += len(split.steps)

    def _add_wait(self, state: DeviceState, reader: Split | None) -> None:
        event = self._events[state.device.name, id(reader)]
        self._operations.append(lambda run: event.synchronize())

    def _add_device(self, index: int, split: Split) -> None:
        state = self.states[split.device]
        for transfer in split.transfers:
            if transfer.source == CPU:
                self._add_transfer(transfer)
        exports = self._exports(index, split)
        done = 0
        # Other devices have what they need before this one goes on to what the host waits for.
        for to_host in (False, True):
            group = [item for item in exports if (item[0] is None or item[0].device == CPU) == to_host]
            cut = max(done, _last_write(split, {t.buffer for _, transfers in group for t in transfers}) + 1)
            self._add_launches(state, split.steps[done:cut])
            self._add_exports(state, group)
            done = cut
        self._add_launches(state, split.steps[done:])

    def _add_exports(self, state: DeviceState, exports: Sequence[tuple[Split | None, list[Transfer]]]) -> None:
        for reader, transfers in exports:
            if reader is not None and reader.device != CPU:
                self._add_sends(transfers)
                continue
            for transfer in transfers:
                self._add_transfer(transfer)
            event = state.device.new_event()
            self._events[state.device.name, id(reader)] = event
            self._operations.append(lambda run, event=event: state.stream.record(event))  # type: ignore[misc]

    def _exports(self, index: int, split: Split) -> list[tuple[Split | None, list[Transfer]]]:
        """Copies that later splits, or None for the results, need from this split's device.

        They leave as soon as they are written: other devices start while this one goes on.
        """
        found: list[tuple[Split | None, list[Transfer]]] = []
        for later in self.graph.splits[index + 1 :]:
            if later.device == split.device:
                return found
            transfers = [t for t in later.transfers if t.source == split.device]
            if transfers:
                found.append((later, transfers))
        transfers = [t for t in self.graph.results if t.source == split.device]
        if transfers:
            found.append((None, transfers))
        return found

    def _add_results(self) -> None:
        for device in dict.fromkeys(t.source for t in self.graph.results):
            self._add_wait(self.states[device], None)

    def _host(self, buffer: Buffer) -> np.ndarray:
        return host_view(self.host_address(buffer), buffer.nbytes)

    def _host_rows(self, transfer: Transfer) -> list[np.ndarray]:
        """Where the bytes of a buffer go in host memory, in order."""
        place = transfer.place
        if place is None:
            return [self._host(transfer.buffer)]
        start, n_rows = self.host_address(place.buffer) + place.offset, place.shape[1]
        return [host_view(start + i * place.strides[1], transfer.buffer.nbytes // n_rows) for i in range(n_rows)]

    def _add_transfer(self, transfer: Transfer) -> None:
        """A copy between a device and the host."""
        buffer = transfer.buffer
        if transfer.source == CPU:
            state, view = self.states[transfer.target], self._host(buffer)
            address = state.base(buffer, self.graph.arenas[transfer.target])

            def to_device(run: Run) -> None:
                state.stream.upload(address, view)
                state.stream.record(state.uploaded)

            self._operations.append(to_device)
        else:
            state, rows = self.states[transfer.source], self._host_rows(transfer)
            address = state.base(buffer, self.graph.arenas[transfer.source])

            def to_host(run: Run) -> None:
                start = address
                for row in rows:
                    state.stream.download(row, start)
                    start += row.nbytes

            self._operations.append(to_host)

    def _add_sends(self, transfers: Sequence[Transfer]) -> None:
        """Copies from one device to another on the source's stream, which waits until the target's memory is free."""
        source, target = self.states[transfers[0].source], self.states[transfers[0].target]
        copies = [
            (target.base(t.buffer, self.graph.arenas[t.target]), source.base(t.buffer, self.graph.arenas[t.source]))
            for t in transfers
        ]
        sizes = [t.buffer.nbytes for t in transfers]
        if source.device.is_remote or target.device.is_remote:
            self._operations.append(send_over_host(source, target, copies, sizes))
            return
        ready, done = target.device.new_event(), source.device.new_event()

        def send(run: Run) -> None:
            target.stream.record(ready)
            with source.device.session():
                source.stream.wait(ready)
                for (end, start), nbytes in zip(copies, sizes, strict=True):
                    source.stream.send(target.device, end, start, nbytes)
                source.stream.record(done)
            target.stream.wait(done)

        self._operations.append(send)

    def _add_launches(self, state: DeviceState, steps: list[Step]) -> None:
        pending: list[Step] = []
        for step in steps:
            if step.uploads:
                self._add_range(state, pending)
                pending = []
                self._add_with_upload(state, step)
            else:
                pending.append(step)
        self._add_range(state, pending)

    def _lower(self, state: DeviceState, node: Node, uploaded: Mapping[Buffer, int] | None = None) -> list[LaunchLike]:
        arena = self.graph.arenas[state.device.name]

        def address(value: Value) -> int:
            if uploaded and value.buffer in uploaded:
                return uploaded[value.buffer] + value.offset
            return state.base(value.buffer, arena) + value.offset

        launches = self._kernels_on(state.device.name).lower(node, address, state.runtime, state.scratch.address)
        self._kernel_names[state.device.name].update(launch.kernel for launch in launches)
        return launches

    def _add_range(self, state: DeviceState, steps: list[Step]) -> None:
        if steps:
            launches = [self._lower(state, step.node) for step in steps]
            merged = self._kernels_on(state.device.name).merged(launch for each in launches for launch in each)
            self._kernel_names[state.device.name].update(launch.kernel for launch in merged)
            self._operations.append(LaunchRange(state, steps, launches, merged, capture=self._params.graphs))

    # weights uploaded for one node

    def _add_with_upload(self, state: DeviceState, step: Step) -> None:
        """Copies a node's weight to a slot on the copy stream, while earlier nodes still run, and runs the node."""
        node, weight = step.node, step.uploads[0]
        slot = state.next_slot()
        launches = self._lower(state, node, {weight.buffer: slot.block.address})
        assert weight.buffer.address is not None
        source = host_view(weight.buffer.address, weight.buffer.nbytes)
        routed = node.kind in EXPERT_KINDS and self._params.only_active_experts
        groups = node.src[2] if routed else None

        def upload_and_launch(run: Run) -> None:
            spans = [weight.span()] if groups is None else self._active_spans(state, node, weight, groups)
            state.fill_slot(slot, ((slot.block.address + start, source[start:end]) for start, end in spans))
            for launch in launches:
                state.stream.launch(launch)
            state.stream.record(slot.free)

        self._operations.append(SingleStep(step, upload_and_launch))

    def _active_spans(self, state: DeviceState, node: Node, weight: Value, groups: Value) -> list[tuple[int, int]]:
        """Byte ranges of the experts that have tokens, from the offsets that moe_group left on the device."""
        n_expert = node.ip[4]
        if groups.buffer not in self._active:
            offsets = np.empty(n_expert + 1, np.int32)
            state.stream.download(offsets, state.base(groups.buffer, self.graph.arenas[state.device.name]))
            state.stream.synchronize()
            self._active[groups.buffer] = np.flatnonzero(np.diff(offsets))
            if groups.buffer in self._told:
                self._told[groups.buffer](offsets)
        spans: list[tuple[int, int]] = []
        for expert in self._active[groups.buffer].tolist():
            start = weight.offset + expert * weight.strides[2]
            if spans and spans[-1][1] == start:
                spans[-1] = spans[-1][0], start + weight.strides[2]
            else:
                spans.append((start, start + weight.strides[2]))
        return spans

    # running

    def run(self, n_kv: int, n_threads: int, work: Any = None) -> None:
        """Executes the graph; results are in host memory afterwards. Parameters as of CompiledPlan.run."""
        run = Run(n_kv, n_threads, work)
        first = next(iter(self.states.values()), None)
        with held_back(), first.device.session() if first else nullcontext():
            try:
                self.start(n_kv)
                for operation in self._operations:
                    operation(run)
            except BaseException:
                self._drain()
                raise

    def _drain(self) -> None:
        """Leaves nothing under way that a later run could meet."""
        for state in self.states.values():
            with suppress(DeviceError):  # the first error is the one to tell
                state.drain()

    def start(self, n_kv: int) -> None:
        """Uploads the inputs."""
        self._active.clear()
        for state in self.states.values():
            state.upload_inputs(n_kv)

    def singly(self) -> Iterator[tuple[Step | None, Operation]]:
        """What run() does after start(), one node at a time; copies and waits come without a node."""
        for operation in self._operations:
            if isinstance(operation, (CpuRange, LaunchRange, SingleStep)):
                yield from operation.singly()
            else:
                yield None, operation

    def host_address(self, buffer: Buffer) -> int:
        """Address of a value in the CPU's arena."""
        return self._arena_address + self.graph.arenas[CPU].offsets[buffer]

    def work_bytes(self, n_threads: int) -> int:
        """Bytes of kernel work memory on the CPU."""
        return self._cpu.work_bytes(n_threads) if self._cpu else 0


def _last_write(split: Split, buffers: set[Buffer]) -> int:
    """Index of the last step that writes one of the buffers, -1 if none does."""
    writes = [i for i, step in enumerate(split.steps) if any(v.buffer in buffers for v in written(step.node))]
    return max(writes, default=-1)
