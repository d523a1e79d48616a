"""Plans of a context: graphs of micro-batches planned, bound to the compute memory and compiled when first needed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from ikpy._native import core
from ikpy._native.steps import Ready, Steps
from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.plan import HybridPlan, Told
from ikpy.backends.cuda.runtime import DeviceRuntime
from ikpy.engine.expert_reads import ExpertReads
from ikpy.engine.graphs import MicroBatchGraphs, UnplannedGraph, buffers_of
from ikpy.engine.paused_collection import paused_collection
from ikpy.graph import work as plan_work
from ikpy.graph.ir import Buffer, Value, contiguous_strides
from ikpy.graph.placement import CPU
from ikpy.graph.plan import CompiledPlan, aligned_bytes
from ikpy.graph.planner import plan_arena
from ikpy.models.latent_attention import PROMPT_TOKENS


class Shape(NamedTuple):
    """Tokens and outputs of a micro-batch, and whether rows of pictures may be among its tokens, or these are texts for
    an encoder."""

    n_tokens: int
    n_outputs: int
    media: bool = False


def largest_shapes(n_ubatch: int, media: bool = False, offloaded: Collection[int] = ()) -> list[Shape]:
    """Tokens and outputs of the micro-batches that need most memory.

    Batches below the prompt size may take another path (absorbed MLA) with larger intermediate values. ``offloaded``:
    smallest batches whose products with weights in host memory run on a device; those below need more on the CPU.
    """
    counts = {n_ubatch, min(n_ubatch, PROMPT_TOKENS - 1), 1, *(n - 1 for n in offloaded if 1 < n <= n_ubatch)}
    shapes = [Shape(t, n) for t in counts for n in {t, 1}]
    return [*shapes, *(Shape(n_ubatch, n, True) for n in {n_ubatch, 1} if media)]


class BuiltGraph:
    """A planned graph with its results (those of `MicroBatchGraphs.nodes`), before it is bound to memory."""

    def __init__(self, graph: UnplannedGraph, devices: DeviceRuntime | None) -> None:
        nodes, results = graph
        self.results = results
        keep = buffers_of(results)
        self.graph = devices.split(nodes, keep) if devices else None
        self.arena = self.graph.arenas[CPU] if self.graph else plan_arena(nodes, keep)
        self.cpu_nodes = [step.node for step in self.graph.steps(CPU)] if self.graph else nodes
        self.n_nodes = len(nodes)

    def cpu_plan(self, arena_address: int, reads: ExpertReads | None = None) -> CompiledPlan | None:
        """What runs on the CPU, if anything does."""
        if not self.cpu_nodes:
            return None
        if reads is None:
            return CompiledPlan(core, self.cpu_nodes, self.arena, arena_address)
        reads.number_layers(self.cpu_nodes)
        return CompiledPlan(core, self.cpu_nodes, self.arena, arena_address, reads.reader)

    def told(self, reads: ExpertReads | None) -> dict[Buffer, Told]:
        """What is told of the experts that devices take from host memory, by buffer of their groups."""
        if self.graph is None or reads is None:
            return {}
        return reads.number_uploads([step for device in self.graph.devices for step in self.graph.steps(device)])


class Plans:
    """Compiled plans by size, kept in ``steps``, and the compute memory that they share.

    threads, thread_sets: their number and what is set for them, for single tokens, and for more. plan_only: sizes are
    computed, nothing is allocated. reads: reads experts ahead.
    """

    def __init__(
        self,
        graphs: MicroBatchGraphs,
        steps: Steps,
        devices: DeviceRuntime | None,
        *,
        threads: tuple[int, int],
        thread_sets: tuple[int, int],
        plan_only: bool,
        reads: ExpertReads | None,
        log: Callable[[str], None],
    ) -> None:
        self._graphs = graphs
        self._steps = steps
        self._devices = devices
        self._n_threads, self._n_threads_batch = threads
        self._thread_sets = thread_sets
        self._plan_only = plan_only
        self._reads = reads
        self._log = log
        self.arena_bytes = self.work_bytes = self.n_graph_nodes = 0
        self.n_graph_splits = 1

    def build(self, n_tokens: int, n_outputs: int, media: bool = False) -> BuiltGraph:
        """The planned graph of a micro-batch."""
        return BuiltGraph(self._graphs.nodes(n_tokens, n_outputs, media), self._devices)

    def get(self, n_tokens: int, n_outputs: int, media: bool = False) -> Ready:
        """The plan of a micro-batch. Raises DeviceError if a device has too little memory for it."""
        return self._steps.get(n_tokens, n_outputs, media) or self._new(Shape(n_tokens, n_outputs, media))

    def threads_for(self, n_tokens: int) -> int:
        """Threads that run a micro-batch of so many tokens."""
        return self._n_threads if n_tokens == 1 else self._n_threads_batch

    # compute memory

    def reserve(self, graphs: dict[Shape, UnplannedGraph]) -> None:
        """Allocates what micro-batches of these shapes need; takes their graphs out of the dict, one by one."""
        self._allocate(*self._needed(graphs))

    def _needed(self, graphs: dict[Shape, UnplannedGraph]) -> tuple[int, int]:
        """Bytes of arena and work memory on the CPU that any micro-batch needs: the most of all kinds of shapes.

        The memory of devices is reserved.
        """
        arena_bytes = work_bytes = 0
        for shape in list(graphs):
            built = BuiltGraph(graphs.pop(shape), self._devices)
            n_tokens = shape.n_tokens
            if built.graph and self._devices:
                self._devices.measure(built.graph)
                self._devices.measure_kernels(built.graph)
            arena_bytes = max(arena_bytes, built.arena.nbytes)
            counts = range(PROMPT_TOKENS if n_tokens > PROMPT_TOKENS else 2, n_tokens)
            needed = plan_work.work_bytes(core, built.cpu_nodes, built.arena, counts, self.threads_for(n_tokens))
            work_bytes = max(work_bytes, needed)
            if n_tokens == 1:
                self.n_graph_nodes = built.n_nodes
                self.n_graph_splits = built.graph.n_splits if built.graph else 1
        if self._devices:
            self._devices.commit()
        return arena_bytes, work_bytes

    def _allocate(self, arena_bytes: int, work_bytes: int) -> None:
        self._steps.clear()
        if not self._plan_only:
            arena = self._devices.host_memory(arena_bytes) if self._devices else aligned_bytes(arena_bytes)
            self._steps.work, self.arena = core.WorkMemory(work_bytes), arena
        self.arena_bytes, self.work_bytes = arena_bytes, work_bytes

    @property
    def compute_bytes(self) -> int:
        """Bytes of the compute buffer: arena of intermediate values plus work memory of the kernels."""
        return self.arena_bytes + self.work_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of compute memory that are really held."""
        return 0 if self._plan_only else self.arena.nbytes + self._steps.work.nbytes

    # compiling

    def _compile(self, shape: Shape, built: BuiltGraph) -> Ready:
        cpu_plan = built.cpu_plan(self.arena.ctypes.data, self._reads)
        if cpu_plan is not None:
            cpu_plan.use_thread_set(self._thread_sets[shape.n_tokens > 1])
        plan: CompiledPlan | HybridPlan
        if built.graph and self._devices:
            plan = self._devices.compile(built.graph, cpu_plan, self.arena.ctypes.data, built.told(self._reads))
        else:
            assert cpu_plan is not None
            plan = cpu_plan
        logits, embeddings, token_states, maxima = (self._result(built, value) for value in built.results)
        results = logits, embeddings, token_states
        native = plan.native if isinstance(plan, CompiledPlan) else None
        direct = not (self._graphs.model.arch.reads_states or self._graphs.checks_order)
        n_tokens, n_outputs, media = shape
        n_threads = self.threads_for(n_tokens)
        return Ready(n_tokens, n_outputs, n_threads, plan, results, maxima, native, direct, media)

    def _result(self, built: BuiltGraph, value: Value | None) -> np.ndarray | None:
        """Float32 view [rows, n] of a result in the arena."""
        if value is None:
            return None
        start = built.arena.offsets[value.buffer] + value.offset
        n, rows = value.shape[0], value.shape[1]
        return self.arena[start : start + contiguous_strides(0, (n, rows))[2]].view(np.float32).reshape(rows, n)

    def _new(self, shape: Shape) -> Ready:
        with paused_collection():
            return self._made(shape)

    def _made(self, shape: Shape) -> Ready:
        built = self.build(*shape)
        if built.graph and self._devices:
            try:
                moved = self._devices.grow(built.graph)
            except DeviceError:
                self._steps.clear()
                raise
            if moved:
                self._steps.clear()
        if built.arena.nbytes > self.arena_bytes:
            self._log(f"compute buffer grows from {self.arena_bytes} to {built.arena.nbytes} bytes for {shape[:2]}")
            self._allocate(built.arena.nbytes, self.work_bytes)
        ready = self._compile(shape, built)
        work_bytes = ready.plan.work_bytes(ready.n_threads)
        if work_bytes > self.work_bytes:
            self._log(f"work memory grows from {self.work_bytes} to {work_bytes} bytes for {shape[:2]}")
            self._steps.work, self.work_bytes = core.WorkMemory(work_bytes), work_bytes
        self._steps.put(ready)
        return ready
