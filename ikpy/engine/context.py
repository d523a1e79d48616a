"""A context: KV cache, compiled plans, and decode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ikpy._native import core
from ikpy.engine.batch import Batch
from ikpy.engine.kv_cache import MAX_SEQUENCES, KVCache, KVCacheFullError
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import UsageError
from ikpy.graph.builder import Graph
from ikpy.graph.fusion import eliminate_dead, fuse
from ikpy.graph.ir import I32, I64, Buffer, Value, contiguous_strides, external
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import Arena, plan_arena
from ikpy.models.batch import BatchGraph, GraphParams
from ikpy.models.rope import RopeParams
from ikpy.quants import registry

__all__ = ["Context", "KVCacheFullError"]

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_0", "q4_0", "iq4_nl", "q8_kv")
MAX_PLANS = 16
PROMPT_TOKENS = 128


class _Built:
    """A planned graph with its results, before it is bound to memory."""

    def __init__(self, nodes: list, arena: Arena, logits: Value | None, embeddings: Value | None) -> None:
        self.nodes, self.arena, self.logits, self.embeddings = nodes, arena, logits, embeddings


class _Ready:
    """A compiled plan and views of its results."""

    def __init__(self, plan: CompiledPlan, logits: np.ndarray | None, embeddings: np.ndarray | None) -> None:
        self.plan, self.logits, self.embeddings = plan, logits, embeddings


class Context:
    """Runs a model. Memory (cache, inputs, arena for the largest micro-batch) is allocated once, here."""

    def __init__(
        self, model: Model, params: ContextParams | None = None, *, log: Callable[[str], None] | None = None
    ) -> None:
        self.model = model
        self.params = params or ContextParams()
        self._log = log or (lambda _: None)
        self._resolve_sizes()
        self.graph_params = self._graph_params()
        model.arch.prepare(self.graph_params.mla)
        specs = [model.arch.cache_specs(il, self.graph_params) for il in range(model.hparams.n_layer)]
        can_shift = model.arch.shift_part(self.graph_params) is not None
        self.kv = KVCache(self.n_ctx, specs, can_shift=can_shift)
        self.embeddings: np.ndarray | None = None
        self._pad = 256 if self.params.flash_attn else 32
        self._make_inputs()
        self._plans: OrderedDict[tuple[int, int], _Ready] = OrderedDict()
        worst = self._build(self.n_ubatch, self.n_ubatch)
        # Small batches may take another path (absorbed MLA) with larger intermediate values.
        small = self._build(min(self.n_ubatch, PROMPT_TOKENS - 1), 1)
        self._allocate_arena(max(worst.arena.nbytes, small.arena.nbytes))
        self._remember((self.n_ubatch, self.n_ubatch), worst)

    # --- settings ---------------------------------------------------------------------------------------------

    def _resolve_sizes(self) -> None:
        p, hp = self.params, self.model.hparams
        wanted = p.n_ctx or hp.n_ctx_train
        pad = 256 if p.flash_attn else 32
        self.n_ctx = -(-wanted // pad) * pad
        self.n_batch = max(16, min(self.n_ctx, p.n_batch))
        self.n_ubatch = min(self.n_batch, p.n_ubatch or p.n_batch)
        if p.n_batch <= 0 or self.n_ubatch <= 0:
            raise UsageError("batch and micro-batch size must be above 0 (-b, -ub)")
        if not 1 <= p.n_seq_max <= MAX_SEQUENCES:
            raise UsageError(f"{p.n_seq_max} parallel sequences: 1 to {MAX_SEQUENCES} are possible")
        self.n_threads = p.n_threads
        self.n_threads_batch = p.n_threads_batch or p.n_threads

    def _cache_type(self, name: str, head_size: int, option: str) -> int:
        if name.lower() not in CACHE_TYPES:
            raise UsageError(f"{option} {name}: unsupported cache type; possible: {', '.join(CACHE_TYPES)}")
        kind = registry.by_name(name)
        if head_size % kind.block_elements:
            raise UsageError(
                f"{option} {name}: the head size {head_size} is no multiple of the block size {kind.block_elements}"
            )
        return kind.id

    def _graph_params(self) -> GraphParams:
        p, hp = self.params, self.model.hparams
        mla = self.model.arch.effective_mla(self.model.params.mla if p.mla is None else p.mla)
        if mla not in (0, 1, 2, 3):
            raise UsageError(f"-mla {mla}: possible values are 0, 1, 2 and 3")
        if p.type_v.lower() not in ("f16", "bf16", "f32") and not p.flash_attn:
            raise UsageError("V cache quantization requires flash_attn")
        return GraphParams(
            n_ctx=self.n_ctx,
            flash_attn=p.flash_attn,
            mla=mla,
            attn_max_batch=p.attn_max_batch,
            type_k=self._cache_type(p.type_k, hp.n_embd_head_k, "-ctk"),
            type_v=self._cache_type(p.type_v, hp.n_embd_head_v, "-ctv"),
            rope=self._rope_params(),
            expert_reduction=p.smart_expert_reduction,
            causal=p.causal,
            n_seq_max=p.n_seq_max,
            grouped_experts=p.grouped_experts,
        )

    def _rope_params(self) -> RopeParams:
        """Run-time RoPE parameters: the user's value wins (model semantics section 1)."""
        p, hp = self.params, self.model.hparams
        scaling = p.rope_scaling or hp.rope_scaling_type
        ext = p.yarn_ext_factor if p.yarn_ext_factor >= 0 else (1.0 if scaling == "yarn" else 0.0)
        return RopeParams(
            freq_base=p.rope_freq_base or hp.rope_freq_base,
            freq_scale=1.0 if scaling == "none" else (p.rope_freq_scale or hp.rope_freq_scale),
            n_ctx_orig=p.yarn_orig_ctx or hp.n_ctx_orig or hp.n_ctx_train,
            ext_factor=ext,
            attn_factor=(p.yarn_attn_factor if p.yarn_attn_factor >= 0 else hp.yarn_attn_factor) * hp.rope_attn_factor,
            beta_fast=p.yarn_beta_fast if p.yarn_beta_fast >= 0 else hp.yarn_beta_fast,
            beta_slow=p.yarn_beta_slow if p.yarn_beta_slow >= 0 else hp.yarn_beta_slow,
        )

    # --- plans ------------------------------------------------------------------------------------------------

    def _make_inputs(self) -> None:
        n = self.n_ubatch
        self._arrays: dict[str, np.ndarray] = {
            name: np.zeros(n, np.int32) for name in ("tokens", "pos", "seq", "cells", "outputs")
        }
        self._arrays["cell_pos"] = self.kv.pos
        self._arrays["cell_seq"] = self.kv.seq

    def _input(self, name: str, n: int) -> Value:
        array = self._arrays[name]
        return external(array.ctypes.data, array, I64 if name == "cell_seq" else I32, (n,), name)

    def _batch_graph(self, n_tokens: int, n_outputs: int) -> BatchGraph:
        inputs = {name: self._input(name, n_tokens) for name in ("tokens", "pos", "seq", "cells")}
        inputs["outputs"] = self._input("outputs", max(1, n_outputs))
        inputs["cell_pos"] = self._input("cell_pos", self.n_ctx)
        inputs["cell_seq"] = self._input("cell_seq", self.n_ctx)
        return BatchGraph(
            Graph(core, self.params.collector), n_tokens, n_outputs, inputs, self.kv.tensors, self.graph_params
        )

    def _build(self, n_tokens: int, n_outputs: int) -> _Built:
        b = self._batch_graph(n_tokens, n_outputs)
        logits = self.model.arch.build(b)
        embeddings = b.embeddings if self.params.embeddings and n_outputs else None
        results = [v for v in (logits, embeddings) if v is not None]
        keep: set[Buffer] = {v.buffer for v in results}
        nodes = fuse(eliminate_dead(b.graph.nodes, keep))
        return _Built(nodes, plan_arena(nodes, keep), logits, embeddings)

    def _compile(self, built: _Built) -> _Ready:
        plan = CompiledPlan(core, built.nodes, built.arena, self._arena_address)
        return _Ready(plan, self._result(built, built.logits), self._result(built, built.embeddings))

    def _result(self, built: _Built, value: Value | None) -> np.ndarray | None:
        """Float32 view [rows, n] of a result in the arena."""
        if value is None:
            return None
        start = self._arena_address - self._arena.ctypes.data + built.arena.offsets[value.buffer] + value.offset
        n, rows = value.shape[0], value.shape[1]
        return self._arena[start : start + contiguous_strides(0, (n, rows))[2]].view(np.float32).reshape(rows, n)

    def _allocate_arena(self, nbytes: int) -> None:
        self._plans.clear()
        self.arena_bytes = nbytes
        self._arena = np.zeros(nbytes + 64, np.uint8)
        self._arena_address = (self._arena.ctypes.data + 63) & ~63

    def _remember(self, key: tuple[int, int], built: _Built) -> _Ready:
        ready = self._compile(built)
        self._plans[key] = ready
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return ready

    def _plan(self, n_tokens: int, n_outputs: int) -> _Ready:
        key = (n_tokens, n_outputs)
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        built = self._build(n_tokens, n_outputs)
        if built.arena.nbytes > self.arena_bytes:
            self._log(f"compute buffer grows from {self.arena_bytes} to {built.arena.nbytes} bytes for {key}")
            self._allocate_arena(built.arena.nbytes)
        return self._remember(key, built)

    @property
    def compute_bytes(self) -> int:
        """Bytes of the compute buffer: arena plus kernel work memory of the largest micro-batch."""
        worst = self._plans.get((self.n_ubatch, self.n_ubatch)) or self._plan(self.n_ubatch, self.n_ubatch)
        return self.arena_bytes + worst.plan.work_bytes(max(self.n_threads, self.n_threads_batch))

    @property
    def n_graph_nodes(self) -> int:
        """Ops of the single-token plan."""
        return len(self._plan(1, 1).plan.ops)

    # --- decode -----------------------------------------------------------------------------------------------

    def decode(self, batch: Batch) -> np.ndarray:
        """Evaluates a batch in micro-batches; returns logits float32 [n_outputs, n_vocab] in batch order.

        With params.embeddings, self.embeddings holds float32 [n_outputs, n_embd]. Raises KVCacheFullError (nothing of
        the failed micro-batch stays in the cache) and UsageError for tokens or sequences out of range.
        """
        self._check(batch)
        self._apply_shifts()
        rows: list[np.ndarray] = []
        states: list[np.ndarray] = []
        for start in range(0, len(batch), self.n_ubatch):
            self._decode_micro_batch(batch, start, min(self.n_ubatch, len(batch) - start), rows, states)
        self.embeddings = np.concatenate(states) if states else None
        if not rows:
            return np.empty((0, self.model.hparams.n_vocab), np.float32)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _check(self, batch: Batch) -> None:
        n_vocab = self.model.hparams.n_vocab
        if len(batch) == 0:
            raise UsageError("an empty batch cannot be decoded")
        bad = (batch.tokens < 0) | (batch.tokens >= n_vocab)
        if bad.any():
            i = int(np.argmax(bad))
            raise UsageError(
                f"token {batch.tokens[i]} at index {i} of the batch is outside the vocabulary of {n_vocab}"
            )
        for ids in batch.seq_ids:
            if not ids or min(ids) < 0 or max(ids) >= MAX_SEQUENCES:
                raise UsageError(f"sequence ids {ids} of a token are outside 0..{MAX_SEQUENCES - 1}")

    def _decode_micro_batch(
        self, batch: Batch, start: int, n: int, rows: list[np.ndarray], states: list[np.ndarray]
    ) -> None:
        part = slice(start, start + n)
        outputs = np.flatnonzero(batch.logits[part])
        a = self._arrays
        seq_ids = batch.seq_ids[part]
        masks = np.array([sum(1 << s for s in ids) for ids in seq_ids], np.uint64)
        cells = self.kv.place(batch.pos[part], masks)
        a["tokens"][:n] = batch.tokens[part]
        a["pos"][:n] = batch.pos[part]
        a["seq"][:n] = [ids[0] for ids in seq_ids]
        a["cells"][:n] = cells
        a["outputs"][: len(outputs)] = outputs
        ready = self._plan(n, len(outputs))
        try:
            ready.plan.run(self.kv.n_kv(self._pad), self.n_threads if n == 1 else self.n_threads_batch)
        except BaseException:
            self.kv.release(cells)
            raise
        if ready.logits is not None:
            rows.append(ready.logits.copy())
        if ready.embeddings is not None:
            states.append(ready.embeddings.copy())

    def _apply_shifts(self) -> None:
        """Re-rotates cached keys whose positions moved since the last decode (model semantics 7.5)."""
        if not self.kv.delta.any():
            return
        part = self.model.arch.shift_part(self.graph_params)
        assert part is not None
        name, offset, n_rot = part
        g = Graph(core)
        deltas = external(self.kv.delta.ctypes.data, self.kv.delta, I32, (self.n_ctx,))
        for il in range(self.model.hparams.n_layer):
            self.model.arch.add_shift(g, il, self.kv.tensors[il, name], deltas, n_rot, offset, self.graph_params)
        arena = plan_arena(g.nodes, set())
        memory = np.zeros(arena.nbytes + 64, np.uint8)
        CompiledPlan(core, g.nodes, arena, (memory.ctypes.data + 63) & ~63).run(self.n_ctx, self.n_threads_batch)
        self.kv.delta[:] = 0

    def profile(self, n_tokens: int) -> list[tuple[str, float]]:
        """Runs the plan of n_tokens once with timing on the present cache contents; (op kind, seconds) per op."""
        return self._plan(n_tokens, 1).plan.profile(self.kv.n_kv(self._pad), self.n_threads)

    def system_info(self) -> dict[str, Any]:
        """Threads and native tier in use."""
        from ikpy._native import tier

        return {"n_threads": self.n_threads, "n_threads_batch": self.n_threads_batch, "tier": tier}
