"""gemma3n: Gemma 3n. Four residual streams (AltUp), a low-rank residual beside attention (LAuReL, arXiv:2411.07501),
inputs for every layer, shared caches, and sparse activations in the first layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.altup import (
    TINY,
    AltUp,
    AltUpSizes,
    correct,
    mean_row,
    of_same_length,
    predict,
    stream,
    take_altup,
)
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.gemma4 import Gemma4, Gemma4Layer, LayerInput
from ikpy.models.hparams import HParams
from ikpy.models.hyper_connections import StreamDecoder, StreamSizes
from ikpy.models.keys import Keys
from ikpy.models.transformer import Layer
from ikpy.models.weights import WeightSource
from ikpy.models.windows import window_layers

N_SPARSE, CUTOFF = 10, 1.6448533535003662
"""Of published models: layers with sparse activations, and standard deviations above the mean from which gates count
(19 of 20 do not).
"""
WINDOW_FREQ_BASE = 10000.0
PERIOD = 5
LAUREL_RANK = 64


@dataclass
class SparseFFN(DenseFFN):
    """A network whose gates count from `cutoff` standard deviations above their mean; mean: as `mean_row` has it."""

    cutoff: float = 0.0
    mean: Value | None = None


@dataclass
class Gemma3nLayer(Gemma4Layer):
    """A block on the active stream; laurel: two matrices and the norm behind them."""

    altup: AltUp | None = None
    laurel: tuple[Value, Value, Value] | None = None


class Gemma3n(StreamDecoder, Gemma4):
    """Layers are those of gemma4 around LAuReL; the last ones attend to the caches of earlier ones."""

    has_stream_head = False

    def read_hparams(self, keys: Keys) -> HParams:
        self.streams = AltUpSizes.read(keys)
        self.stream_sizes = StreamSizes(self.streams.n, 0, 0.0)
        hp = super().read_hparams(keys)
        if not self.n_layer_input:
            raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.embedding_length_per_layer_input is 0")
        if hp.window_freq_base is None:
            hp.window_freq_base = WINDOW_FREQ_BASE
        usual = [CUTOFF if il < N_SPARSE else -math.inf for il in range(hp.n_layer)]
        given = keys.has("activation_sparsity_scale")
        self.cutoffs = keys.limits_per_layer("activation_sparsity_scale", hp.n_layer) if given else usual
        return hp

    def read_windows(self, keys: Keys, n_layer: int) -> list[bool]:
        return window_layers(keys, n_layer, PERIOD)

    # tensors

    def load_global(self, weights: WeightSource) -> None:
        hp, n = self.hp, self.streams.n
        self.rope_freqs = None
        self.load_layer_inputs(weights)
        shape = (hp.n_embd, hp.n_embd, n - 1)
        self.altup_proj = weights.take("altup_proj.weight", shape)
        self.altup_unembd_proj = weights.take("altup_unembd_proj.weight", shape)
        self.mean_in = mean_row(weights, "token_embd.mean", hp.n_embd)
        self.mean_out = mean_row(weights, "output.mean", hp.n_embd)

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        ffn = super().load_ffn(weights, il, prefix)
        if self.cutoffs[il] == -math.inf:
            return ffn
        mean = mean_row(weights, f"{prefix}.ffn_gate.mean", self.hp.n_ff[il])
        return SparseFFN(**vars(ffn), cutoff=self.cutoffs[il], mean=mean)

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        d = self.hp.n_embd
        rank = weights.rows(f"{prefix}.laurel_l.weight", LAUREL_RANK)
        return Gemma3nLayer(
            **vars(super().load_layer(weights, il, prefix)),
            altup=take_altup(weights, prefix, d, self.streams),
            laurel=(
                weights.take(f"{prefix}.laurel_l.weight", (d, rank)),
                weights.take(f"{prefix}.laurel_r.weight", (rank, d)),
                weights.take(f"{prefix}.laurel_post_norm.weight", (d,)),
            ),
        )

    # graph

    def first_streams(self, b: BatchGraph, x: Value) -> Value:
        """The embedding and its projections, which are as long as it."""
        g, n = b.graph, self.streams.n
        d, n_tokens = x.shape[:2]
        projected = g.mul_mat(self.altup_proj.reshape(d, d * (n - 1)), x).reshape(d, n - 1, n_tokens)
        streams = g.new(d, n, n_tokens)
        # The projections first: what is written to them later goes to their device, and the embedding has another.
        g.copy(of_same_length(b, projected, x, self.mean_in), streams.slice(1, 1, n - 1))
        g.copy(x.reshape(d, 1, n_tokens), streams.slice(1, 0, 1))
        return streams

    def collapsed(self, b: BatchGraph, streams: Value) -> Value:
        """The mean of the first stream and of what the others project to, which is as long as it."""
        g, n = b.graph, self.streams.n
        first = stream(streams, 0)
        total = first
        for i in range(1, n):
            matrix = self.altup_unembd_proj.slice(2, i - 1, 1)
            projected = g.mul_mat(matrix, stream(streams, i))
            alike = of_same_length(
                b, projected.reshape(projected.shape[0], 1, projected.shape[1]), first, self.mean_out
            )
            total = g.add(total, alike.reshape(*projected.shape[:2]))
        return g.scale(total, 1.0 / n)

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        """One layer on the residual streams x [D, n, T] (only the output rows in the last layer)."""
        layer: Gemma3nLayer = self.layers[il]  # type: ignore[assignment]
        assert layer.altup is not None
        predicted = predict(b, layer.altup, self.streams, x, self.hp.norm_eps)
        h = self.norm(b, stream(predicted, self.streams.active), layer.attn_norm)
        attended = self.attention(b, il, layer.attn, h)
        return self._behind(b, layer, *self.keep_rows(b, il, predicted, attended, h, *self.token_inputs(b, il, x)))

    def _behind(
        self, b: BatchGraph, layer: Gemma3nLayer, predicted: Value, attended: Value, h: Value, own: Value
    ) -> Value:
        """The rest of a layer: streams predicted [D, n, T], normed rows h [D, T] and the layer's own input [P, T]."""
        assert layer.altup is not None and layer.own_input is not None
        g, eps = b.graph, self.hp.norm_eps
        x = stream(predicted, self.streams.active)
        x = self.add_branch(b, x, self.attention_output(b, layer.attn, attended), layer.attn_post_norm)
        x = g.scale(g.add(x, self._laurel(b, layer, h)), math.sqrt(0.5))
        x = self.add_branch(b, x, self.ffn(b, layer.ffn, self.norm(b, x, layer.ffn_norm)), layer.ffn_post_norm)
        corrected, weights = correct(b, layer.altup, self.streams, predicted, x, eps)
        scaled = g.mul(stream(corrected, self.streams.active), layer.altup.scale)
        return g.hyper_expand(corrected, self._own_input(b, layer.own_input, scaled, own), weights)

    def _laurel(self, b: BatchGraph, layer: Gemma3nLayer, h: Value) -> Value:
        """h [D, T] plus its normed image of low rank."""
        assert layer.laurel is not None
        left, right, norm = layer.laurel
        return b.graph.add(h, self.norm(b, b.graph.mul_mat(right, b.graph.mul_mat(left, h)), norm))

    def _own_input(self, b: BatchGraph, parts: LayerInput, x: Value, own: Value) -> Value:
        """What a layer's own input [P, T], gated by x [D, T], adds to streams."""
        gated = b.graph.gated(b.graph.mul_mat(parts.gate, x), own, self.activation)
        return self.norm(b, b.graph.mul_mat(parts.proj, gated), parts.post_norm)

    def ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        if not isinstance(ffn, SparseFFN):
            return super().ffn(b, ffn, x)
        assert ffn.gate is not None and ffn.mean is not None
        g = b.graph
        gate = g.mul_mat(ffn.gate, x)
        normed = g.layer_norm(gate, None, None, TINY)
        deviation = g.mul_mat(ffn.mean, g.mul(gate, normed))
        above = g.mul(g.unary(g.scale(normed, 1.0, -ffn.cutoff), "relu"), deviation)
        return g.mul_mat(ffn.down, g.gated(above, g.mul_mat(ffn.up, x), self.activation))
