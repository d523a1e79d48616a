"""A context: the KV cache of a model and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from ikpy._native import core
from ikpy._native.steps import Steps
from ikpy._native.tables import Taken
from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.check import check_values
from ikpy.backends.cuda.compare import NodeError, compare_nodes
from ikpy.backends.cuda.inputs import Inputs
from ikpy.backends.cuda.plan import HybridPlan, Run
from ikpy.backends.cuda.runtime import DeviceRuntime
from ikpy.engine.batch import Batch
from ikpy.engine.encoded_texts import with_texts
from ikpy.engine.expert_reads import expert_reads
from ikpy.engine.forks import check_threads
from ikpy.engine.graphs import MicroBatchGraphs
from ikpy.engine.inputs import BatchInputs, as_input
from ikpy.engine.kv_cache import KVCache, KVCacheFullError
from ikpy.engine.micro_batches import MicroBatches
from ikpy.engine.model import Model
from ikpy.engine.nan_search import first_not_a_number
from ikpy.engine.padding import padded_outputs, padded_tokens
from ikpy.engine.params import ContextParams
from ikpy.engine.paused_collection import paused_collection
from ikpy.engine.plans import Plans, Shape, aligned_bytes, largest_shapes
from ikpy.engine.results import Results, copied, first_rows, joined
from ikpy.engine.settings import Sizes, graph_params, media_width, turns_positions, window_cells
from ikpy.errors import UsageError
from ikpy.graph.builder import Graph
from ikpy.graph.ir import Node
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import plan_arena
from ikpy.models.batch import FULL
from ikpy.signals.held_interrupts import held_back

__all__ = ["Context", "KVCacheFullError"]

# Plans that are kept at most.
MAX_PLANS = 32
# Tokens of the load-time check: enough for the kernels of prompts.
CHECK_TOKENS = 16


class Context:
    """Runs a model. Memory (cache, inputs, arena and work memory of the largest micro-batch) is allocated once, here.

    With a model of which only the header was read, the same sizes are computed and nothing is allocated.
    """

    def __init__(
        self, model: Model, params: ContextParams | None = None, *, log: Callable[[str], None] | None = None
    ) -> None:
        self.model = model
        self.params = with_texts(model, params or ContextParams())
        if model.arch.predicts_alone:
            raise UsageError(
                f"{model.gguf.path}: {model.arch.why_not_alone}; give it with -md and --spec-type "
                f"{model.arch.drafts_as} beside the model"
            )
        self.plan_only = model.params.header_only
        self._log = log or (lambda _: None)
        self.params.check()
        sizes = Sizes.of(self.params, model.hparams)
        self.n_ctx, self.n_batch, self.n_ubatch, self._pad = sizes.n_ctx, sizes.n_batch, sizes.n_ubatch, sizes.pad
        if self.n_batch > self.params.n_batch:
            self._log(f"warning: -b: {self.params.n_batch} is too small, using {self.n_batch}")
        self.n_threads = self.params.n_threads
        self.n_threads_batch = self.params.n_threads_batch or self.params.n_threads
        check_threads(max(self.n_threads, self.n_threads_batch))
        windows = window_cells(model, self.params, sizes)
        self.graph_params = graph_params(model, self.params, self.n_ctx, frozenset(windows), self._log)
        model.prepare(self.graph_params.mla, self._log)
        specs = [model.arch.cache_specs(il, self.graph_params) for il in range(model.hparams.n_layer)]
        can_shift = model.arch.shift_part(0, self.graph_params) is not None
        self.kv = KVCache(
            self.n_ctx,
            specs,
            can_shift=can_shift,
            windows=windows,
            states=[model.arch.state_specs(il) for il in range(model.hparams.n_layer)],
            n_sequences=self.params.n_seq_max,
            n_kept=self.params.n_kept_states,
            n_tokens=self.n_ubatch,
            allocate=not self.plan_only,
        )
        # Of cached texts with pictures, which turn no positions there.
        self.moves_media = can_shift and self.graph_params.rope_sections is None
        self._no_logits = np.empty((0, model.hparams.n_vocab), np.float32)
        self.embeddings: np.ndarray | None = None
        self.token_states: np.ndarray | None = None
        adapters = self.params.adapters
        state_size = model.arch.state_size if model.arch.reads_states else 0
        keep_slots = self.kv.recurrent.keep_slots if self.kv.recurrent else None
        self._inputs = BatchInputs(
            self.n_ubatch,
            self.kv.cells,
            n_adapters=len(adapters),
            state_size=state_size,
            keep_slots=keep_slots,
            media_width=media_width(model, self.params.media),
            turns=turns_positions(model, self.graph_params),
        )
        batches = MicroBatches(
            model, self.kv, self.params.media, n_ubatch=self.n_ubatch, sees_all=not self.graph_params.causal
        )
        self._micro_batches, limits = batches, (batches.n_vocab, batches.n_positions)
        self._steps = Steps(core.run_plan, self._inputs, self.kv.tables, *limits, self._pad, MAX_PLANS)
        self._graphs = MicroBatchGraphs(model, self.params, self.graph_params, self._inputs, self.kv)
        with paused_collection():
            self._make_plans()
        if self.devices and self.kv.recurrent and not self.plan_only:
            self.kv.recurrent.move(self.devices.state_memory(self.kv.recurrent.n_slots))
        if self.devices and self.devices.setup.params.check and not self.plan_only:
            self._check_values()

    def _make_plans(self) -> None:
        """Finds out what the largest micro-batches need, and takes it."""
        hp, setup = self.model.hparams, self.model.devices
        offloaded = setup.offloaded_sizes(hp.n_expert, hp.n_expert_used) if setup else ()
        shapes = largest_shapes(self.n_ubatch, self.params.media is not None, offloaded)
        graphs = {shape: self._graphs.nodes(*shape) for shape in shapes}
        self.devices = self._use_devices([nodes for nodes, _ in graphs.values()])
        self._plans = Plans(
            self._graphs,
            self._steps,
            self.devices,
            threads=(self.n_threads, self.n_threads_batch),
            thread_sets=self.params.thread_sets,
            plan_only=self.plan_only,
            reads=None if self.plan_only else expert_reads(self.model, self._log),
            log=self._log,
        )
        self._plans.reserve(graphs)
        # A repeated token would go on with its sequence's state, be seen by those before it, or count as another one.
        alone = self._graphs.is_recurrent or not self.graph_params.causal or self.params.collector is not None
        has_gpus = self.devices is not None and self.devices.setup.has_gpus
        self._pads = has_gpus and not alone and self.model.arch.decoder_start is None

    # what it holds

    @property
    def n_ctx_seq(self) -> int:
        """Tokens of one sequence at most: those of the context, or as many as the model has embeddings of positions."""
        return min(self.n_ctx, self.model.arch.max_position or self.n_ctx)

    @property
    def compute_bytes(self) -> int:
        """Bytes of the compute buffer: arena of intermediate values, work memory of the kernels, rows of pictures."""
        return self._plans.compute_bytes + self._inputs.row_bytes

    @property
    def allocated_bytes(self) -> dict[str, int]:
        """Bytes that this context really holds, per kind, to compare with what was planned."""
        return {"cache": self.kv.allocated_bytes, "compute": self._plans.allocated_bytes + self._inputs.row_bytes}

    @property
    def n_graph_nodes(self) -> int:
        """Nodes of the graph of a single token."""
        return self._plans.n_graph_nodes

    @property
    def n_graph_splits(self) -> int:
        """Splits of the graph of a single token between devices."""
        return self._plans.n_graph_splits

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

    def steer(self, directions: np.ndarray | None) -> None:
        """Control vectors float32 [n_layer, n_embd] to add behind the layers from now on; None: nothing.

        Raises UsageError for another shape.
        """
        if self._graphs.steer(directions):
            self._steps.clear()
        if self.devices and self._graphs.steering is not None:
            self.devices.set_directions(self._graphs.steering)

    @property
    def steering_checksum(self) -> int:
        """CRC-32 of the control vectors in use, 0 without any."""
        return self._graphs.steering_checksum

    # devices

    def _use_devices(self, graphs: Sequence[list[Node]]) -> DeviceRuntime | None:
        """The model's devices with this context's caches, if it has any."""
        if self.model.devices is None:
            return None
        others = [cells for window, cells in self.kv.cells.items() if window != FULL]
        windows = [array for cells in others for array in (cells.pos, cells.seq)]
        inputs = Inputs(self._inputs.all_arrays, [self.kv.pos, self.kv.seq], windows)
        states = self.kv.recurrent.tensors if self.kv.recurrent else {}
        caches = self.kv.tensors, states
        devices = DeviceRuntime(self.model.devices, inputs, *caches, self._log, plan_only=self.plan_only)
        devices.settle(graphs)
        return devices

    def _check_values(self) -> None:
        """Looks at every value of a short prompt and of one token.

        Raises ResourceError naming the op and tensor that made a NaN.
        """
        for plan, run in self._trials():
            check_values(plan, run)

    def first_not_a_number(self, tokens: Sequence[int]) -> str:
        """Evaluates a sequence in the empty cache op by op; the first op that makes a NaN or an overflow, "" if none.

        The cache is empty afterwards. Without tokens there is nothing to look at.
        """
        if not tokens:
            return ""
        self.kv.clear()
        try:
            for piece in self._micro_batches.of(Batch.single(list(tokens))):
                if found := self._search(piece.write(self._inputs, self.kv.place(piece.batch))):
                    return found
                self.kv.evaluated(piece.batch)
            return ""
        finally:
            self.kv.clear()

    def _search(self, shape: Shape) -> str:
        """The first op with a bad value in the micro-batch whose inputs are set."""
        work, n_kv, n_threads = self._steps.work, self._steps.n_kv(), self._plans.threads_for(shape.n_tokens)
        if self.devices:
            plan = self._plans.get(*shape).plan
            try:
                check_values(plan, Run(n_kv, n_threads, work))
            except DeviceError as error:
                return str(error)
            return ""
        built = self._plans.build(*shape)
        cpu_plan = built.cpu_plan(self._plans.arena.ctypes.data)
        assert cpu_plan is not None
        return first_not_a_number(
            built, self._plans.arena, n_kv, lambda i: cpu_plan.run(n_kv, n_threads, work, i, i + 1)
        )

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
                plan = self._plans.get(n, 1).plan
                assert isinstance(plan, HybridPlan)
                yield plan, Run(self._steps.n_kv(), self._plans.threads_for(n), self._steps.work)
            finally:
                self.kv.clear()

    def sync_caches_to_host(self, wanted: Mapping[str, Sequence[tuple[int, int]]] | None = None) -> None:
        """Makes the cache tensors in host memory up to date, to be read; wanted: rows of buffers, if others are not."""
        if self.devices:
            self.devices.download_caches(wanted)

    def sync_caches_to_devices(self) -> None:
        """Takes over cache tensors that were written in host memory."""
        if self.devices:
            self.devices.upload_caches()

    # decode

    def decode(self, batch: Batch, states: np.ndarray | None = None, *, copy: bool = True) -> np.ndarray:
        """Evaluates a batch in micro-batches; returns logits float32 [n_outputs, n_vocab] in batch order.

        copy=False: the logits may be memory of the context that the next call overwrites, for who has done with them
        by then. states: float32 [n, state_size], for prediction heads: the hidden state behind the token before each
        one. With params.embeddings, self.embeddings holds float32 [n_outputs, n_embd], of prediction heads their states
        [n_outputs, state_size]; with params.token_states, self.token_states holds the hidden states of all tokens,
        float32 [n, state_size].

        Raises KVCacheFullError, and UsageError for tokens, positions or sequences out of range. Nothing of a batch that
        fails, or is interrupted, stays in the cache; after an interruption window layers may lack tokens, which
        `kv.rewind` heeds.
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
        self._micro_batches.check(batch)
        self._check_states(batch, states)
        if self.kv.shifted:
            self._apply_shifts()
        pieces = self._micro_batches.of(batch)
        taken: list[Taken] = []
        found: list[Results] = []
        try:
            for piece in pieces:
                if states is not None:
                    self._inputs.write_states(states[piece.part])
                taken.append(self.kv.place(piece.batch))
                shape = piece.write(self._inputs, taken[-1])
                found.append(self._evaluate(shape, copy=copy or len(pieces) > 1))
                self.kv.evaluated(piece.batch)
        except BaseException:
            for cells in taken:
                self.kv.release(cells)
            raise
        logits, self.embeddings, self.token_states = map(joined, zip(*found, strict=True))
        return self._no_logits if logits is None else logits

    def _evaluate(self, shape: Shape, *, copy: bool) -> Results:
        """Results of the micro-batch whose inputs are set, logits as a view without ``copy``."""
        padded = self._padded(shape)
        if padded != shape:
            self._inputs.pad(shape[:2], padded[:2])
        ready = self._plans.get(*padded)
        ready.plan.run(self._steps.n_kv(), ready.n_threads, self._steps.work)
        n_tokens, n_outputs, _ = shape
        logits, embeddings, token_states = ready.results
        logits, embeddings = first_rows(logits, n_outputs), first_rows(embeddings, n_outputs)
        return copied(logits) if copy else logits, copied(embeddings), copied(first_rows(token_states, n_tokens))

    def _padded(self, shape: Shape) -> Shape:
        """Sizes of the plan for a micro-batch; on devices, those near to each other share one."""
        if not self._pads:
            return shape
        n_tokens, n_outputs, media = shape
        padded = padded_tokens(n_tokens, self.n_ubatch)
        return Shape(padded, padded_outputs(n_outputs, n_tokens, padded), media)

    def _check_states(self, batch: Batch, states: np.ndarray | None) -> None:
        wanted = (len(batch), self.model.arch.state_size) if self.model.arch.reads_states else None
        if (None if states is None else states.shape) != wanted:
            raise UsageError(f"hidden states of shape {wanted} are needed" if wanted else "the model reads no states")

    def _apply_shifts(self) -> None:
        """Re-rotates cached keys whose positions moved since the last decode."""
        g = Graph(core)
        deltas = {window: as_input(cells.delta, cells.n_cells, "delta") for window, cells in self.kv.cells.items()}
        for il in range(self.model.hparams.n_layer):
            part = self.model.arch.shift_part(il, self.graph_params)
            assert part is not None
            name, offset, n_rot = part
            if (il, name) not in self.kv.tensors:  # reads the cache of another layer
                continue
            moved = deltas[self.kv.window_of[il, name]]
            self.model.arch.add_shift(g, il, self.kv.tensors[il, name], moved, n_rot, offset, self.graph_params)
        if not g.nodes:  # nothing is rotated: positions are distances alone
            for cells in self.kv.cells.values():
                cells.settle()
            return
        arena = plan_arena(g.nodes, set())
        memory = aligned_bytes(arena.nbytes)
        plan = CompiledPlan(core, g.nodes, arena, memory.ctypes.data)
        with held_back():  # between the two, keys would be rotated a second time
            self.sync_caches_to_host()
            plan.run(self.n_ctx, self.n_threads_batch)
            for cells in self.kv.cells.values():
                cells.settle()
            self.sync_caches_to_devices()

    def profile(self, n_tokens: int, n_outputs: int = 1) -> list[tuple[str, float]]:
        """Runs the plan of such a batch once with timing on the present cache contents; (op kind, seconds) per op."""
        plan = self._plans.get(n_tokens, n_outputs).plan
        if isinstance(plan, HybridPlan):
            raise UsageError("timings of single ops are those of the CPU: use -ngl 0")
        return plan.profile(self._steps.n_kv(), self.n_threads)
