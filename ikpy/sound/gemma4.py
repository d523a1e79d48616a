"""Gemma 4: a conformer (arXiv:2005.08100) of the Universal Speech Model (arXiv:2303.01037).

Two convolutions take every fourth frame and pitch; layers are x += ffn(x) / 2, x += attention(x), x += conv(x),
x += ffn(x) / 2, and a norm. A state sees itself and the eleven before it, each key with a vector for its distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.blocks import split_heads
from ikpy.sound.projector import SoundProjector, SoundSource
from ikpy.sound.samples import SAMPLE_RATE, Samples
from ikpy.sound.spectrogram import HOP, htk_levels
from ikpy.vision.convolution import convolution, convolved, halved
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.weights import Linear, ProjectorWeights, value_of

PIECE = 30 * SAMPLE_RATE
"""Samples that are heard together."""
WINDOW = 320
"""Samples of a frame; the first has silence in its first half."""
ROWS = 1024
"""That are made together of samples alone."""
FLOOR = 1e-3
"""Added to the strength of pitches."""
CONTEXT = 12
"""States that one sees."""
LONGEST_WAVE = 10000.0
EPS = 1e-6
SOFTCAP = 50.0
QUERY_SCALE = 1 / math.log(2)
KEY_SCALE = math.log1p(math.e) / math.log(2)
RESIDUAL = 0.5
MAX_TAPS = 64


@dataclass
class FeedForward:
    """Weights of x + down(silu(up norm x)) normed / 2."""

    norm: Value
    up: Linear
    down: Linear
    post_norm: Value


class Layer:
    """Weights of a layer."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int, head: int) -> None:
        self.weights, self.prefix, self.n = weights, prefix, n
        self.first, self.last = self.feed_forward(""), self.feed_forward("_1")
        self.attn_norm, self.attn_post_norm = self.norm("attn_pre_norm"), self.norm("attn_post_norm")
        self.q, self.k, self.v, self.out = (self.matrix(f"attn_{part}", n, n) for part in ("q", "k", "v", "out"))
        self.distances = self.matrix("attn_k_rel", n, n)
        scales = weights.array(f"{prefix}.per_dim_scale.weight", (head,)) * np.float32(QUERY_SCALE / math.sqrt(head))
        self.query_scales = value_of(np.tile(scales, n // head), f"{prefix}.per_dim_scale.weight")
        self.conv_norm, self.conv_mid_norm = self.norm("conv_norm"), self.norm("norm_conv")
        self.start, self.end = self.matrix("conv_pw1", n, 2 * n), self.matrix("conv_pw2", n, n)
        name = f"{prefix}.conv_dw.weight"
        taps = weights.shape(name)[0]
        if not 0 < taps <= MAX_TAPS:
            raise FileFormatError(f"{weights.gguf.path}: tensor '{name}' has {taps} taps, not 1 to {MAX_TAPS}")
        filters = weights.array(name, (taps, n), (taps, 1, n)).reshape(n, taps)
        self.taps = [value_of(filters[:, i], f"{name} ({i})") for i in range(taps)]
        self.out_norm = self.norm("ln2")

    def norm(self, name: str) -> Value:
        """Factors of a norm."""
        return self.weights.table(f"{self.prefix}.{name}.weight", (self.n,))

    def matrix(self, name: str, n_in: int, n_out: int | None = None) -> Linear:
        """A matrix with its bounds."""
        return self.weights.linear(f"{self.prefix}.{name}", n_in, n_out)

    def feed_forward(self, end: str) -> FeedForward:
        """One of both networks."""
        up = self.matrix(f"ffn_up{end}", self.n)
        down = self.matrix(f"ffn_down{end}", up.n_out, self.n)
        return FeedForward(self.norm(f"ffn_norm{end}"), up, down, self.norm(f"ffn_post_norm{end}"))


class Gemma4AudioProjector(SoundProjector):
    """One matrix behind the layers, a norm and another matrix."""

    begin = "<|audio>"
    end = "<audio|>"

    def load(self, source: SoundSource) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters, self.filter_norms, n_in = [], [], 1
        for i in (0, 1):
            self.filters.append(convolution(weights, f"a.conv1d.{i}", n_in))
            n_in = self.filters[-1].n_out
            self.filter_norms.append(weights.table(f"a.conv1d.{i}.norm.weight", (n_in,)))
        self.joining = weights.linear("a.input_projection", n_in * halved(halved(self.params.n_mel)), n)
        self.layers = [Layer(weights, f"a.blk.{il}", n, self.params.head_size) for il in range(self.params.n_layer)]
        self.last = weights.linear("a.pre_encode.out", n)
        norm = "mm.a.soft_emb_norm.weight"
        self.norm = weights.vector(norm, self.last.n_out)
        self.projection = weights.linear("mm.a.input_projection", self.last.n_out)

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    def pieces(self, samples: Samples) -> list[NDArray[np.float32]]:
        parts = [samples[start : start + PIECE] for start in range(0, len(samples), PIECE)]
        heard = [part for part in parts if len(part) > WINDOW // 2] or parts[:1]
        return [self.frames(part) for part in heard]

    def n_rows(self, n_samples: int) -> int:
        lengths = [min(PIECE, n_samples - start) for start in range(0, n_samples, PIECE)]
        heard = [n for n in lengths if n > WINDOW // 2] or lengths[:1]
        return sum(halved(halved(self.n_frames(n))) for n in heard)

    @staticmethod
    def n_frames(n_samples: int) -> int:
        """Whole frames of a piece."""
        return max(-(-(n_samples - WINDOW // 2) // HOP), 1)

    def frames(self, samples: Samples) -> NDArray[np.float32]:
        """Levels of whole frames."""
        return htk_levels(samples, self.params.n_mel, self.n_frames(len(samples)), WINDOW, FLOOR)

    @property
    def n_frame_elements(self) -> int:
        return self.params.n_mel

    def build(self, b: PictureGraph) -> Value:
        g, size = b.graph, (b.n_patches, self.params.n_mel)
        x = b.patches.reshape(1, size[0] * size[1])
        for layer, norm in zip(self.filters, self.filter_norms, strict=True):
            x = g.unary(g.layer_norm(convolved(b, layer, x, size), norm, None, EPS), "relu")
            size = halved(size[0]), halved(size[1])
        x = b.linear(self.joining, x.reshape(x.shape[0] * size[1], size[0]))
        for block in self.layers:
            x = self.feed_forward(b, block.first, x)
            x = self.attention(b, block, x)
            x = self.convolution(b, block, x)
            x = g.rms_norm(self.feed_forward(b, block.last, x), block.out_norm, EPS)
        return b.linear(self.projection, g.rms_norm(b.linear(self.last, x), self.norm, EPS))

    @staticmethod
    def feed_forward(b: PictureGraph, layer: FeedForward, x: Value) -> Value:
        """x and half of what a network makes of it."""
        g = b.graph
        inner = b.activated(b.linear(layer.up, g.rms_norm(x, layer.norm, EPS)), "silu")
        return g.add(x, g.scale(g.rms_norm(b.linear(layer.down, inner), layer.post_norm, EPS), RESIDUAL))

    def attention(self, b: PictureGraph, layer: Layer, x: Value) -> Value:
        """x and what its states see. Keys and values are laid out once for each state that sees them."""
        g, (n, count), head = b.graph, x.shape[:2], self.params.head_size
        seen = np.arange(count)[:, None] + np.arange(1 - CONTEXT, 1)
        places = b.indices(np.maximum(seen, -1).reshape(-1))
        states = g.rms_norm(x, layer.attn_norm, EPS)
        q = g.mul(b.linear(layer.q, states), layer.query_scales)
        k = g.get_rows(g.scale(b.linear(layer.k, states), KEY_SCALE), places).reshape(n, CONTEXT, count)
        k = g.add(k, g.mul_mat(layer.distances.weight, b.floats(waves(n))))
        v = g.get_rows(b.linear(layer.v, states), places)
        ends = CONTEXT * (1 + np.arange(count))
        ranges = np.stack([ends - np.minimum(ends // CONTEXT, CONTEXT), ends], axis=1)
        heads = (split_heads(part, head) for part in (q, k.reshape(n, CONTEXT * count), v))
        found = b.attention(*heads, scale=1.0, ranges=ranges, softcap=SOFTCAP)
        return g.add(x, g.rms_norm(b.linear(layer.out, found), layer.attn_post_norm, EPS))

    @staticmethod
    def convolution(b: PictureGraph, layer: Layer, x: Value) -> Value:
        """x and a convolution over the last states of each channel, gated before."""
        g, (n, count), past = b.graph, x.shape[:2], len(layer.taps) - 1
        start = b.linear(layer.start, g.rms_norm(x, layer.conv_norm, EPS))
        line = g.new(n, count + past)
        if past:
            g.copy(b.floats(np.zeros((past, n))), line.slice(1, 0, past))
        g.copy(g.gated(start.slice0(n, n), start.slice0(0, n), "sigmoid"), line.slice(1, past, count))
        total: Value | None = None
        for i, tap in enumerate(layer.taps):
            part = g.mul(line.slice(1, i, count), tap)
            total = part if total is None else g.add(total, part)
        assert total is not None
        inner = b.activated(g.rms_norm(total, layer.conv_mid_norm, EPS), "silu")
        return g.add(x, b.linear(layer.end, inner))


class Gemma4UnifiedAudioProjector(SoundProjector):
    """Gemma 4 without encoders: samples as they are, a norm and one matrix."""

    begin = Gemma4AudioProjector.begin
    end = Gemma4AudioProjector.end
    most_frames = ROWS

    def load(self, source: SoundSource) -> None:
        name = "mm.a.input_projection"
        self.projection = source.weights.linear(name, source.weights.shape(f"{name}.weight")[0])

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    @property
    def n_frame_elements(self) -> int:
        return self.projection.weight.shape[0]

    def n_rows(self, n_samples: int) -> int:
        return -(-n_samples // self.n_frame_elements)

    def pieces(self, samples: Samples) -> list[NDArray[np.float32]]:
        n = self.n_frame_elements
        frames = np.pad(samples, (0, -len(samples) % n)).reshape(-1, n)
        return [frames[start : start + ROWS] for start in range(0, len(frames), ROWS)]

    def build(self, b: PictureGraph) -> Value:
        return b.linear(self.projection, b.graph.rms_norm(b.patches, None, self.params.eps))


def waves(n: int) -> NDArray[np.float32]:
    """Vectors [CONTEXT, n] of distances, the largest first: sines, then cosines."""
    rates = LONGEST_WAVE ** -(np.arange(n // 2) / max(n // 2 - 1, 1))
    angles = np.arange(CONTEXT - 1, -1, -1)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
