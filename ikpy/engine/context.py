"""A context: KV cache, compiled plans, and decode."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NoReturn

import numpy as np

from ikpy._native import core
from ikpy._native.draws import BLOCK_LOGITS
from ikpy._native.steps import Ready, Steps
from ikpy._native.tables import Taken
from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.check import check_values
from ikpy.backends.cuda.compare import NodeError, compare_nodes
from ikpy.backends.cuda.plan import HybridPlan, Run
from ikpy.backends.cuda.runtime import DeviceRuntime
from ikpy.backends.cuda.state import Inputs
from ikpy.engine.adapter import low_rank_weights
from ikpy.engine.batch import Batch
from ikpy.engine.inputs import BatchInputs, as_input
from ikpy.engine.kv_cache import KVCache, KVCacheFullError
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.settings import Sizes, graph_params, window_cells
from ikpy.errors import UsageError
from ikpy.graph import work as plan_work
from ikpy.graph.adapters import GraphAdapters
from ikpy.graph.builder import Graph
from ikpy.graph.fusion import eliminate_dead, fuse
from ikpy.graph.ir import F32, Buffer, Node, Value, contiguous_strides, external
from ikpy.graph.placement import CPU
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import plan_arena
from ikpy.models.batch import BatchGraph

__all__ = ["Context", "KVCacheFullError"]

MAX_PLANS = 16
PROMPT_TOKENS = 128
# Tokens of the load-time check: enough for the kernels of prompts.
CHECK_TOKENS = 16
MAX_POSITION = 1 << 31
# Rows and width of logits whose largest are searched for while they are computed: prompts have more, and fewer are
# found as fast without.
MAXIMA_ROWS = 16
MAXIMA_WIDTH = 16384

Results = tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]
"""Logits float32 [n_outputs, n_vocab], embeddings [n_outputs, n_embd] and token states [n, n_embd] as far as wanted."""


def aligned_bytes(n: int) -> np.ndarray:
    """Zeroed uint8 [n] whose address is a multiple of 64."""
    memory = np.zeros(n + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + n]


def _buffers(values: Iterable[Value | None]) -> set[Buffer]:
    return {v.buffer for v in values if v is not None}


def _copied(result: np.ndarray | None) -> np.ndarray | None:
    return None if result is None else result.copy()


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Rows of several micro-batches, of which some have none."""
    rows = [part for part in parts if part is not None]
    if len(rows) > 1:
        return np.concatenate(rows)
    return rows[0] if rows else None


class _Built:
    """A planned graph with its results (those of `Context._graph`), before it is bound to memory."""

    def __init__(self, nodes: list[Node], results: tuple[Value | None, ...], devices: DeviceRuntime | None) -> None:
        self.results = results
        keep = _buffers(results)
        self.graph = devices.split(nodes, keep) if devices else None
        self.arena = self.graph.arenas[CPU] if self.graph else plan_arena(nodes, keep)
        self.cpu_nodes = [step.node for step in self.graph.steps(CPU)] if self.graph else nodes
        self.n_nodes = len(nodes)

    def cpu_plan(self, arena_address: int) -> CompiledPlan | None:
        """What runs on the CPU, if anything does."""
        return CompiledPlan(core, self.cpu_nodes, self.arena, arena_address) if self.cpu_nodes else None


class Context:
    """Runs a model. Memory (cache, inputs, arena and work memory of the largest micro-batch) is allocated once, here.

    With a model of which only the header was read, the same sizes are computed and nothing is allocated.
    """

    def __init__(
        self, model: Model, params: ContextParams | None = None, *, log: Callable[[str], None] | None = None
    ) -> None:
        self.model = model
        self.params = params or ContextParams()
        self.plan_only = model.params.header_only
        self._log = log or (lambda _: None)
        self.params.check()
        sizes = Sizes.of(self.params, model.hparams)
        self.n_ctx, self.n_batch, self.n_ubatch, self._pad = sizes.n_ctx, sizes.n_batch, sizes.n_ubatch, sizes.pad
        self.n_threads = self.params.n_threads
        self.n_threads_batch = self.params.n_threads_batch or self.params.n_threads
        windows = window_cells(model, self.params, sizes)
        self.graph_params = graph_params(model, self.params, self.n_ctx, frozenset(windows), self._log)
        model.arch.prepare(self.graph_params.mla)
        specs = [model.arch.cache_specs(il, self.graph_params) for il in range(model.hparams.n_layer)]
        can_shift = model.arch.shift_part(self.graph_params) is not None
        self.kv = KVCache(self.n_ctx, specs, can_shift=can_shift, windows=windows, allocate=not self.plan_only)
        self._no_logits = np.empty((0, model.hparams.n_vocab), np.float32)
        self.embeddings: np.ndarray | None = None
        self.token_states: np.ndarray | None = None
        adapters = self.params.adapters
        self._low_rank = low_rank_weights(model, adapters)
        n_embd = model.hparams.n_embd if model.arch.reads_states else 0
        self._inputs = BatchInputs(self.n_ubatch, self.kv.cells, n_adapters=len(adapters), n_embd=n_embd)
        self._n_positions = model.arch.max_position or MAX_POSITION
        limits = model.hparams.n_vocab, self._n_positions
        self._steps = Steps(core.run_plan, self._inputs, self.kv.tables, *limits, self._pad, MAX_PLANS)
        self._steering: np.ndarray | None = None
        self.arena_bytes = self.work_bytes = self.n_graph_nodes = 0
        self.n_graph_splits = 1
        shapes = [(t, n) for t in self._token_counts() for n in {t, 1}]
        self.devices = self._use_devices(shapes)
        self._allocate_compute(*self._plan_compute(shapes))
        if self.devices and self.devices.setup.params.check and not self.plan_only:
            self._check_values()

    # --- plans ------------------------------------------------------------------------------------------------

    def _graph_adapters(self, n_tokens: int, outputs: Value) -> GraphAdapters | None:
        if not self.params.adapters:
            return None
        return GraphAdapters(self._low_rank, self._inputs.scale_values(n_tokens), n_tokens, outputs)

    def steer(self, directions: np.ndarray | None) -> None:
        """Control vectors float32 [n_layer, n_embd] to add behind the layers from now on; None: nothing."""
        hp = self.model.hparams
        if directions is not None and directions.shape != (hp.n_layer, hp.n_embd):
            raise UsageError(f"control vectors of shape {directions.shape}; {(hp.n_layer, hp.n_embd)} are needed")
        if directions is None or self._steering is None:
            self._steps.clear()
            self._steering = None if directions is None else np.array(directions, np.float32)
        else:
            self._steering[:] = directions
        if self.devices and self._steering is not None:
            self.devices.set_directions(self._steering)

    @property
    def steering_checksum(self) -> int:
        """CRC-32 of the control vectors in use, 0 without any."""
        used = self._steering is not None and self._steering.any()
        return zlib.crc32(self._steering.tobytes()) if used and self._steering is not None else 0

    def _batch_graph(self, n_tokens: int, n_outputs: int) -> BatchGraph:
        inputs = self._inputs.values(n_tokens, n_outputs)
        cells = self._inputs.cell_values(n_tokens)
        graph = Graph(core, self.params.collector, self._graph_adapters(n_tokens, inputs["outputs"]))
        batch = BatchGraph(
            graph, n_tokens, n_outputs, inputs, cells, self.kv.tensors, self.kv.window_of, self.graph_params
        )
        batch.keeps_states = self.params.token_states
        batch.states = self._inputs.state_values(n_tokens)
        if self._steering is not None:
            shape = self._steering.shape[::-1]
            batch.steering = external(self._steering.ctypes.data, self._steering, F32, shape, "steering", "input")
        return batch

    def _graph(self, n_tokens: int, n_outputs: int) -> tuple[list[Node], tuple[Value | None, ...]]:
        """Nodes of a micro-batch; its logits, embeddings, token states, and the largest of every few logits."""
        b = self._batch_graph(n_tokens, n_outputs)
        logits = self.model.arch.build(b)
        if b.graph.adapters and n_outputs:
            self._check_adapters(b.graph.adapters)
        wanted = self.params.embeddings or self.model.arch.is_encoder
        maxima = None
        if logits and n_outputs <= MAXIMA_ROWS and logits.shape[0] >= MAXIMA_WIDTH and self.model.devices is None:
            maxima = b.graph.block_maxima(logits, BLOCK_LOGITS)
        results = logits, b.embeddings if wanted and n_outputs else None, b.token_states, maxima
        return fuse(eliminate_dead(b.graph.nodes, _buffers(results))), results

    def _build(self, n_tokens: int, n_outputs: int) -> _Built:
        return _Built(*self._graph(n_tokens, n_outputs), self.devices)

    # --- compute memory ---------------------------------------------------------------------------------------

    def _token_counts(self) -> set[int]:
        """Sizes of micro-batches that need most memory.

        Batches below the prompt size may take another path (absorbed MLA) with larger intermediate values.
        """
        return {self.n_ubatch, min(self.n_ubatch, PROMPT_TOKENS - 1), 1}

    def _plan_compute(self, shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Bytes of arena and work memory on the CPU that any micro-batch needs: the most of all kinds of shapes.

        The memory of devices is reserved.
        """
        arena_bytes = work_bytes = 0
        for n_tokens, n_outputs in shapes:
            built = self._build(n_tokens, n_outputs)
            if built.graph and self.devices:
                self.devices.measure(built.graph)
            arena_bytes = max(arena_bytes, built.arena.nbytes)
            counts = range(PROMPT_TOKENS if n_tokens > PROMPT_TOKENS else 2, n_tokens)
            needed = plan_work.work_bytes(core, built.cpu_nodes, built.arena, counts, self._threads_for(n_tokens))
            work_bytes = max(work_bytes, needed)
            if n_tokens == 1:
                self.n_graph_nodes = built.n_nodes
                self.n_graph_splits = built.graph.n_splits if built.graph else 1
        if self.devices:
            self.devices.commit()
        return arena_bytes, work_bytes

    def _threads_for(self, n_tokens: int) -> int:
        return self.n_threads if n_tokens == 1 else self.n_threads_batch

    def _allocate_compute(self, arena_bytes: int, work_bytes: int) -> None:
        self._steps.clear()
        self.arena_bytes, self.work_bytes = arena_bytes, work_bytes
        if self.plan_only:
            return
        self._arena = self.devices.host_memory(arena_bytes) if self.devices else aligned_bytes(arena_bytes)
        self._arena_address = self._arena.ctypes.data
        self._steps.work = core.WorkMemory(work_bytes)

    @property
    def compute_bytes(self) -> int:
        """Bytes of the compute buffer: arena of intermediate values plus work memory of the kernels."""
        return self.arena_bytes + self.work_bytes

    @property
    def allocated_bytes(self) -> dict[str, int]:
        """Bytes that this context really holds, per kind, to compare with what was planned."""
        compute = 0 if self.plan_only else self._arena.nbytes + self._steps.work.nbytes
        return {"cache": self.kv.allocated_bytes, "compute": compute}

    def _check_adapters(self, graph_adapters: GraphAdapters) -> None:
        for i, adapter in enumerate(self.params.adapters):
            unused = [name for name in adapter.pairs if (i, name) not in graph_adapters.used]
            if unused:
                raise UsageError(
                    f"{adapter.path}: an adapter of '{unused[0]}' has no matrix product to act on"
                    + (f" with -mla {self.graph_params.mla}" if self.model.arch.effective_mla(1) else "")
                    + "; merge it into the model"
                )

    def _compile(self, n_tokens: int, n_outputs: int, built: _Built) -> Ready:
        cpu_plan = built.cpu_plan(self._arena_address)
        plan: CompiledPlan | HybridPlan
        if built.graph and self.devices:
            plan = self.devices.compile(built.graph, cpu_plan, self._arena_address)
        else:
            assert cpu_plan is not None
            plan = cpu_plan
        logits, embeddings, token_states, maxima = (self._result(built, value) for value in built.results)
        results = logits, embeddings, token_states
        native = plan.native if isinstance(plan, CompiledPlan) else None
        direct = not self.model.arch.reads_states
        return Ready(n_tokens, n_outputs, self._threads_for(n_tokens), plan, results, maxima, native, direct)

    def _result(self, built: _Built, value: Value | None) -> np.ndarray | None:
        """Float32 view [rows, n] of a result in the arena."""
        if value is None:
            return None
        start = built.arena.offsets[value.buffer] + value.offset
        n, rows = value.shape[0], value.shape[1]
        return self._arena[start : start + contiguous_strides(0, (n, rows))[2]].view(np.float32).reshape(rows, n)

    def _plan(self, n_tokens: int, n_outputs: int) -> Ready:
        return self._steps.get(n_tokens, n_outputs) or self._new_plan(n_tokens, n_outputs)

    def _new_plan(self, n_tokens: int, n_outputs: int) -> Ready:
        built = self._build(n_tokens, n_outputs)
        if built.graph and self.devices:
            try:
                moved = self.devices.grow(built.graph)
            except DeviceError:
                self._steps.clear()
                raise
            if moved:
                self._steps.clear()
        shape = (n_tokens, n_outputs)
        if built.arena.nbytes > self.arena_bytes:
            self._log(f"compute buffer grows from {self.arena_bytes} to {built.arena.nbytes} bytes for {shape}")
            self._allocate_compute(built.arena.nbytes, self.work_bytes)
        ready = self._compile(n_tokens, n_outputs, built)
        self._steps.put(ready)
        work_bytes = ready.plan.work_bytes(self._threads_for(n_tokens))
        if work_bytes > self.work_bytes:
            self._log(f"work memory grows from {self.work_bytes} to {work_bytes} bytes for {shape}")
            self._steps.work, self.work_bytes = core.WorkMemory(work_bytes), work_bytes
        return ready

    @cached_property
    def max_uniform_tokens(self) -> int:
        """Most tokens of a batch whose products round as those of one token do; larger ones may use other kernels."""
        types = {value.type_id for value in self.model.weights.values() if value.shape[1] > 1}
        for n in range(2, self.n_ubatch + 1):
            if any(core.activation_format(t, n) != core.activation_format(t, 1) for t in types):
                return n - 1
        return self.n_ubatch

    @property
    def adapter_scales(self) -> np.ndarray:
        """Scale of every adapter per sequence, float32 [64, number of adapters]; takes effect with the next decode."""
        return self._inputs.scales_by_sequence

    # --- devices ----------------------------------------------------------------------------------------------

    def _use_devices(self, shapes: Sequence[tuple[int, int]]) -> DeviceRuntime | None:
        """The model's devices with this context's caches, if it has any."""
        if self.model.devices is None:
            return None
        windows = [array for cells in self.kv.windows.values() for array in (cells.pos, cells.seq)]
        inputs = Inputs(self._inputs.all_arrays, [self.kv.pos, self.kv.seq], windows)
        devices = DeviceRuntime(self.model.devices, inputs, self.kv.tensors, self._log, plan_only=self.plan_only)
        devices.settle([self._graph(*shape)[0] for shape in shapes])
        return devices

    def _check_values(self) -> None:
        """Looks at every value of a short prompt and of one token.

        Raises ResourceError naming the op and tensor that made a NaN.
        """
        for plan, run in self._trials():
            check_values(plan, run)

    def compare_devices(self) -> Iterator[NodeError]:
        """Errors of the nodes that run on devices against the CPU on the same inputs, for a short prompt and one token.

        The cache is empty afterwards.
        """
        for plan, run in self._trials():
            yield from compare_nodes(core, plan, run)

    def _trials(self) -> Iterator[tuple[HybridPlan, Run]]:
        """Plans of a short prompt and of one token whose inputs are set; the cache is emptied after each."""
        for n in (min(CHECK_TOKENS, self.n_ubatch), 1):
            batch = Batch.single([0] * n)
            self._inputs.write(batch, self.kv.place(batch))
            try:
                plan = self._plan(n, 1).plan
                assert isinstance(plan, HybridPlan)
                yield plan, Run(self._steps.n_kv(), self._threads_for(n), self._steps.work)
            finally:
                self.kv.clear()

    def sync_caches_to_host(self) -> None:
        """Makes the cache tensors in host memory up to date, to be read."""
        if self.devices:
            self.devices.download_caches()

    def sync_caches_to_devices(self) -> None:
        """Takes over cache tensors that were written in host memory."""
        if self.devices:
            self.devices.upload_caches()

    # --- decode -----------------------------------------------------------------------------------------------

    def decode(self, batch: Batch, states: np.ndarray | None = None, *, copy: bool = True) -> np.ndarray:
        """Evaluates a batch in micro-batches; returns logits float32 [n_outputs, n_vocab] in batch order.

        copy=False: the logits may be memory of the context that the next call overwrites, for who has done with them
        by then. states: float32 [n, n_embd], for prediction heads: the hidden state behind the token before each one.
        With params.embeddings, self.embeddings holds float32 [n_outputs, n_embd]; with params.token_states,
        self.token_states holds the hidden states of all tokens, float32 [n, n_embd]. Raises KVCacheFullError, and
        UsageError for tokens, positions or sequences out of range. Nothing of a batch that fails, or is interrupted,
        stays in the cache.
        """
        results = None if states is not None else self._steps.run(batch)
        if results is None:
            return self._decode_in_pieces(batch, states, copy)
        logits, embeddings, token_states = results
        self.embeddings = embeddings if embeddings is None else embeddings.copy()
        self.token_states = token_states if token_states is None else token_states.copy()
        if logits is None:
            return self._no_logits
        return logits.copy() if copy else logits

    @property
    def known_maxima(self) -> Steps:
        """Knows the largest of every 64 logits of a row that the last `decode` returned without a copy.

        Of few rows, large vocabularies and contexts without devices only; for `Sampler.sample`.
        """
        return self._steps

    def _decode_in_pieces(self, batch: Batch, states: np.ndarray | None, copy: bool) -> np.ndarray:
        """`decode` of any batch, whatever has to be made ready first."""
        if self.plan_only:
            raise UsageError("only the header of the model was read: it can be measured, not run")
        self._check(batch)
        self._check_states(batch, states)
        if self.kv.shifted:
            self._apply_shifts()
        pieces = batch.pieces(self.n_ubatch)
        taken: list[Taken] = []
        found: list[Results] = []
        try:
            for i, piece in enumerate(pieces):
                if states is not None:
                    self._inputs.write_states(states[i * self.n_ubatch :][: len(piece)])
                taken.append(self.kv.place(piece))
                found.append(self._evaluate(piece, taken[-1], copy=copy or len(pieces) > 1))
        except BaseException:
            for cells in taken:
                self.kv.release(cells)
            raise
        logits, self.embeddings, self.token_states = map(_joined, zip(*found, strict=True))
        return self._no_logits if logits is None else logits

    def _evaluate(self, piece: Batch, taken: Taken, *, copy: bool) -> Results:
        """Results of a micro-batch in the cells it took, logits as a view without ``copy``."""
        ready = self._plan(len(piece), self._inputs.write(piece, taken))
        ready.plan.run(self._steps.n_kv(), ready.n_threads, self._steps.work)
        logits, embeddings, token_states = ready.results
        return _copied(logits) if copy else logits, _copied(embeddings), _copied(token_states)

    def _check_states(self, batch: Batch, states: np.ndarray | None) -> None:
        wanted = (len(batch), self.model.hparams.n_embd) if self.model.arch.reads_states else None
        if (None if states is None else states.shape) != wanted:
            raise UsageError(f"hidden states of shape {wanted} are needed" if wanted else "the model reads no states")

    def _check(self, batch: Batch) -> None:
        if batch.first_invalid(self.model.hparams.n_vocab, self._n_positions) >= 0:
            self._refuse(batch)
        if len(batch) == 0:
            raise UsageError("an empty batch cannot be decoded")
        if not self.graph_params.causal and len(batch) > self.n_ubatch:
            raise UsageError(
                f"{len(batch)} tokens that see each other must fit one micro-batch of {self.n_ubatch}: "
                "raise n_ubatch (-ub)"
            )

    def _refuse(self, batch: Batch) -> NoReturn:
        """Says what is wrong with the first token that cannot be evaluated."""
        n_vocab, n_positions = self.model.hparams.n_vocab, self._n_positions
        i = batch.first_invalid(n_vocab, n_positions)
        token, position = int(batch.tokens[i]), int(batch.pos[i])
        if not 0 <= token < n_vocab:
            raise UsageError(f"token {token} at index {i} of the batch is outside the vocabulary of {n_vocab}")
        if position < 0:
            raise UsageError(f"position {position} of the batch is below 0")
        known = f": the model has embeddings for {n_positions} positions" if self.model.arch.max_position else ""
        raise UsageError(f"position {position} is too large{known}")

    def _apply_shifts(self) -> None:
        """Re-rotates cached keys whose positions moved since the last decode (model semantics 7.5)."""
        part = self.model.arch.shift_part(self.graph_params)
        assert part is not None
        name, offset, n_rot = part
        g = Graph(core)
        deltas = {window: as_input(cells.delta, cells.n_cells, "delta") for window, cells in self.kv.cells.items()}
        for il in range(self.model.hparams.n_layer):
            moved = deltas[self.kv.window_of[il, name]]
            self.model.arch.add_shift(g, il, self.kv.tensors[il, name], moved, n_rot, offset, self.graph_params)
        arena = plan_arena(g.nodes, set())
        memory = aligned_bytes(arena.nbytes)
        self.sync_caches_to_host()
        CompiledPlan(core, g.nodes, arena, memory.ctypes.data).run(self.n_ctx, self.n_threads_batch)
        for cells in self.kv.cells.values():
            cells.settle()
        self.sync_caches_to_devices()

    def profile(self, n_tokens: int, n_outputs: int = 1) -> list[tuple[str, float]]:
        """Runs the plan of such a batch once with timing on the present cache contents; (op kind, seconds) per op."""
        plan = self._plan(n_tokens, n_outputs).plan
        if isinstance(plan, HybridPlan):
            raise UsageError("timings of single ops are those of the CPU: use -ngl 0")
        return plan.profile(self._steps.n_kv(), self.n_threads)
