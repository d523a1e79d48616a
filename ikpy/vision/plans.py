"""Plans of pictures: the graph of every size compiled once, on the CPU or on a device, over memory that they share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ikpy._native import core
from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.backends.cuda.inputs import bytes_of
from ikpy.backends.cuda.plan import HybridPlan
from ikpy.errors import ResourceError
from ikpy.graph.fusion import eliminate_dead
from ikpy.graph.ir import Value
from ikpy.graph.placement import CPU
from ikpy.graph.plan import CompiledPlan, aligned_bytes
from ikpy.graph.planner import plan_arena
from ikpy.machine.memory import check_memory
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import MAX_PATCHES

MAX_PLANS = 8
"""Sizes of pictures whose plans are kept at most."""
MAX_PLAN_BYTES = 1 << 28
"""Of their patches and constants together, but for those of the last one: tables of positions of large pictures."""

Build = Callable[[PictureGraph], Value]
"""Makes the graph of a picture, its result being f32 [n, rows]."""


class PicturePlan:
    """A compiled graph of pictures of one size. device: where it runs but for what that lacks kernels for."""

    def __init__(self, build: Build, n_elements: int, rows: int, columns: int, device: EncoderRuntime | None) -> None:
        self.patches = np.zeros((rows * columns, n_elements), np.float32)
        b = PictureGraph(self.patches, rows, columns)
        result = build(b)
        self._result = result if result.is_contiguous else b.graph.copy(result, b.graph.new(*result.shape))
        keep = {self._result.buffer}
        nodes = eliminate_dead(b.graph.nodes, keep)
        self._device = device
        self.split = device.split(nodes, keep) if device else None
        self._nodes = [step.node for step in self.split.steps(CPU)] if self.split else nodes
        self.arena = self.split.arenas[CPU] if self.split else plan_arena(nodes, keep)
        self.constants = b.constants
        self.n_bytes = b.n_bytes
        self._compiled: CompiledPlan | HybridPlan | None = None

    @property
    def input_bytes(self) -> int:
        """Of the inputs on a device."""
        return bytes_of([self.patches, *self.constants])

    def bind(self, memory: NDArray[np.uint8]) -> None:
        """Compiles it for an arena, after the device has made room."""
        address = memory.ctypes.data
        on_cpu = CompiledPlan(core, self._nodes, self.arena, address) if self._nodes else None
        if on_cpu is not None:
            on_cpu.use_thread_set(1)  # as prompts
        if self._device and self.split:
            self._place_inputs()
            self._compiled = self._device.compile(self.split, on_cpu, address, {})
        else:
            self._compiled = on_cpu
        start = self.arena.offsets[self._result.buffer] + self._result.offset
        n, rows = self._result.shape[:2]
        self.rows = memory[start : start + 4 * n * rows].view(np.float32).reshape(rows, n)

    def _place_inputs(self) -> None:
        if self._device and self._device.inputs:
            self._device.inputs.place([self.patches], self.constants)

    def run(self, n_threads: int) -> None:
        """Evaluates the picture in `patches`."""
        assert self._compiled is not None
        self._place_inputs()
        self._compiled.run(1, n_threads)


class PicturePlans:
    """Plans by size, the last few kept, over one arena; threads take turns. n_elements: of a patch."""

    def __init__(self, build: Build, n_elements: int, n_threads: int, device: EncoderRuntime | None = None) -> None:
        self._build = build
        self._n_elements = n_elements
        self._n_threads = n_threads
        self._device = device
        self._plans: OrderedDict[tuple[int, int], PicturePlan] = OrderedDict()
        self._arena = aligned_bytes(0)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def n_bytes(self) -> int:
        """Bytes of what the plans hold beside the arena."""
        return sum(plan.n_bytes for plan in self._plans.values())

    def measure(self, rows: int, columns: int) -> None:
        """Counts what pictures of so many patches take in the needs of the device."""
        plan = self._new(rows, columns)
        if self._device and plan.split:
            self._device.measure(plan.split, plan.input_bytes)
            self._device.measure_kernels(plan.split)

    def run(self, patches: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
        """The result [rows, n] for the patches of a picture [rows * columns, n_elements]."""
        with self._lock:
            plan = self._plan(rows, columns)
            plan.patches[:] = patches
            plan.run(self._n_threads)
            return plan.rows.copy()

    def _new(self, rows: int, columns: int) -> PicturePlan:
        return PicturePlan(self._build, self._n_elements, rows, columns, self._device)

    def _plan(self, rows: int, columns: int) -> PicturePlan:
        size = rows, columns
        if size not in self._plans:
            if rows * columns > MAX_PATCHES:
                raise ResourceError(f"a picture of {columns} x {rows} patches; at most {MAX_PATCHES} are possible")
            plan = self._new(rows, columns)
            self._make_room(plan, f"a picture of {columns} x {rows} patches takes")
            plan.bind(self._arena)
            self._plans[size] = plan
            while len(self._plans) > 1 and (len(self._plans) > MAX_PLANS or self.n_bytes > MAX_PLAN_BYTES):
                self._plans.popitem(last=False)
        self._plans.move_to_end(size)
        return self._plans[size]

    def _make_room(self, plan: PicturePlan, what: str) -> None:
        """Memory for a plan; those that were bound to what it replaces go."""
        if self._device and plan.split:
            try:
                moved = self._device.grow(plan.split, plan.input_bytes)
            except DeviceError:
                self._plans.clear()
                raise
            if moved:
                self._plans.clear()
        nbytes = plan.arena.nbytes
        if nbytes > self._arena.nbytes:
            check_memory(nbytes, what, "use a smaller one")
            self._plans.clear()
            self._arena = self._device.host_memory(nbytes) if self._device else aligned_bytes(nbytes)
