"""The graphs of a context's micro-batches: the model's nodes with adapters, control vectors and fusion."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from ikpy._native import core
from ikpy._native.draws import BLOCK_LOGITS
from ikpy.engine.adapter import low_rank_weights
from ikpy.engine.inputs import BatchInputs
from ikpy.engine.kv_cache import KVCache
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import UsageError
from ikpy.graph.adapters import GraphAdapters
from ikpy.graph.builder import Graph
from ikpy.graph.fusion import eliminate_dead, fuse
from ikpy.graph.ir import F32, Buffer, Node, Value, external
from ikpy.models.batch import BatchGraph, GraphParams

# Rows and width of logits whose largest are searched for while they are computed: prompts have more, and fewer are
# found as fast without.
MAXIMA_ROWS = 16
MAXIMA_WIDTH = 16384


UnplannedGraph = tuple[list[Node], tuple[Value | None, ...]]
"""Nodes of a micro-batch; its logits, embeddings, token states, and the largest of every few logits."""


def buffers_of(values: Iterable[Value | None]) -> set[Buffer]:
    """Buffers of the values that are there."""
    return {v.buffer for v in values if v is not None}


class MicroBatchGraphs:
    """Builds the graph of a micro-batch of any size from a model, over the inputs and caches of a context."""

    def __init__(
        self, model: Model, params: ContextParams, graph_params: GraphParams, inputs: BatchInputs, kv: KVCache
    ) -> None:
        self.model = model
        self.steering: np.ndarray | None = None
        """Control vectors float32 [n_layer, n_embd] that are added behind the layers."""
        self._params = params
        self._graph_params = graph_params
        self._inputs = inputs
        self._kv = kv
        self._low_rank = low_rank_weights(model, params.adapters)

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has layers with states."""
        return self._kv.recurrent is not None

    @property
    def checks_order(self) -> bool:
        """Whether tokens must follow those before them, which the cache checks."""
        return self.is_recurrent or bool(self._kv.stretches)

    def nodes(self, n_tokens: int, n_outputs: int, media: bool = False) -> UnplannedGraph:
        """The graph of a micro-batch, before it is planned. media: rows of pictures may be among its tokens, or
        these are texts for an encoder.

        Raises UsageError if an adapter has no effect.
        """
        b = self._batch_graph(n_tokens, n_outputs)
        b.encodes = media and self.model.arch.decoder_start is not None
        b.media = self._inputs.media_values(n_tokens) if media and not b.encodes else None
        logits = self.model.arch.build(b)
        if b.graph.adapters and n_outputs:
            self._check_adapters(b.graph.adapters)
        wanted = self._params.embeddings or self.model.arch.is_encoder
        maxima = None
        if logits and n_outputs <= MAXIMA_ROWS and logits.shape[0] >= MAXIMA_WIDTH and self.model.devices is None:
            maxima = b.graph.block_maxima(logits, BLOCK_LOGITS)
        results = logits, b.embeddings if wanted and n_outputs else None, b.token_states, maxima
        return fuse(eliminate_dead(b.graph.nodes, buffers_of(results))), results

    def _batch_graph(self, n_tokens: int, n_outputs: int) -> BatchGraph:
        inputs = self._inputs.values(n_tokens, n_outputs)
        cells = self._inputs.cell_values(n_tokens)
        graph = Graph(core, self._params.collector, self._graph_adapters(n_tokens, inputs["outputs"]))
        batch = BatchGraph(
            graph, n_tokens, n_outputs, inputs, cells, self._kv.tensors, self._kv.window_of, self._graph_params
        )
        batch.recurrent = self._kv.recurrent.slots if self._kv.recurrent else {}
        batch.keeps_states = self._params.token_states
        batch.states = self._inputs.state_values(n_tokens)
        batch.stretches = self._inputs.stretch_values(n_tokens)
        if self.steering is not None:
            shape = self.steering.shape[::-1]
            batch.steering = external(self.steering.ctypes.data, self.steering, F32, shape, "steering", "input")
        return batch

    def _graph_adapters(self, n_tokens: int, outputs: Value) -> GraphAdapters | None:
        if not self._params.adapters:
            return None
        return GraphAdapters(self._low_rank, self._inputs.scale_values(n_tokens), n_tokens, outputs)

    def _check_adapters(self, graph_adapters: GraphAdapters) -> None:
        for i, adapter in enumerate(self._params.adapters):
            unused = [name for name in adapter.pairs if (i, name) not in graph_adapters.used]
            if unused:
                raise UsageError(
                    f"{adapter.path}: an adapter of '{unused[0]}' has no matrix product to act on"
                    + (f" with -mla {self._graph_params.mla}" if self.model.arch.effective_mla(1) else "")
                    + "; merge it into the model"
                )

    def steer(self, directions: np.ndarray | None) -> bool:
        """Control vectors float32 [n_layer, n_embd] from now on; None: nothing. Returns whether graphs change.

        Raises UsageError for another shape.
        """
        hp = self.model.hparams
        if directions is not None and directions.shape != (hp.n_layer, hp.n_embd):
            raise UsageError(f"control vectors of shape {directions.shape}; {(hp.n_layer, hp.n_embd)} are needed")
        if directions is not None and self.steering is not None:
            self.steering[:] = directions
            return False
        self.steering = None if directions is None else np.array(directions, np.float32)
        return True

    @property
    def steering_checksum(self) -> int:
        """CRC-32 of the control vectors in use, 0 without any."""
        return zlib.crc32(self.steering.tobytes()) if self.steering is not None and self.steering.any() else 0
