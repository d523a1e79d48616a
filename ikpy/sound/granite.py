"""Granite Speech: a conformer whose states see their block of 200, and a Q-Former (arXiv:2301.12597) of every window.

Two frames are a state. score(i, j) = q_i (k_j + r[i - j]) / sqrt(d) with learned vectors r of distances. Behind the
middle layer what it says of characters is added to the states. Windows of 15 states become three rows.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.blocks import split_heads
from ikpy.models.keys import MAX_LAYERS
from ikpy.sound.conformer import EPS, ConformerLayer, convolution, half_network
from ikpy.sound.params import PART
from ikpy.sound.projector import SoundProjector, SoundSource
from ikpy.sound.samples import Samples
from ikpy.sound.spectrogram import HOP, WINDOW, centred_powers, hann, htk_filters, loudness
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import ranges_of
from ikpy.vision.params import integers, size
from ikpy.vision.weights import Linear, Norm, ProjectorWeights, value_of

N_FFT = 512
FRAMES = 2
"""That are a state."""
PIECE = 6000
"""States that are heard together, two minutes."""
WINDOW_EPS = 1e-12
MAX_WINDOW = 256
MAX_DISTANCES = 1 << 13
MAX_CHARACTERS = 1 << 12
"""Of which every state is told each: published models have some hundred."""
WINDOW_LAYER = re.compile(r"a\.proj_blk\.(\d{1,9})\.")
WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Elements of keys and of values that kernels of devices know."""


class Layer(ConformerLayer):
    """Weights of a layer. distances: vectors [2 reach + 1, d], those of what lies furthest behind first."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int, head: int, n_kernel: int, reach: int) -> None:
        super().__init__(weights, prefix, n, n_kernel)
        self.distances = weights.array(f"{prefix}.attn_rel_pos_emb", (head, 2 * reach + 1))


class WindowLayer:
    """Weights of a layer of the Q-Former: queries see each other, then their window."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int, n_state: int) -> None:
        def attention(name: str, n_in: int) -> tuple[Linear, Linear, Linear, Linear, Norm]:
            q, k, v, out = (
                weights.linear(f"{prefix}.{name}_{part}", width, n)
                for part, width in (("q", n), ("k", n_in), ("v", n_in), ("out", n))
            )
            return q, k, v, out, weights.norm(f"{prefix}.{name}_norm", n)

        self.own, self.cross = attention("self_attn", n), attention("cross_attn", n_state)
        self.up = weights.linear(f"{prefix}.ffn_up", n)
        self.down = weights.linear(f"{prefix}.ffn_down", self.up.n_out, n)
        self.norm = weights.norm(f"{prefix}.ffn_norm", n)


class GraniteSpeechProjector(SoundProjector):
    """Rows of windows of states, one matrix behind."""

    most_frames = PIECE

    def load(self, source: SoundSource) -> None:
        weights, keys, params = source.weights, source.keys, self.params
        n, head = params.n_embd, params.head_size
        self.block = size(keys, "chunk_size", most=MAX_DISTANCES, part=PART)
        n_kernel = size(keys, "conv_kernel_size", part=PART)
        reach = size(keys, "max_pos_emb", most=MAX_DISTANCES, part=PART)
        if self.block > reach:
            raise FileFormatError(f"{self.path}: clip.audio.chunk_size is {self.block}, above max_pos_emb {reach}")
        if params.n_mel % FRAMES:
            raise FileFormatError(f"{self.path}: clip.audio.num_mel_bins is {params.n_mel}, not even")
        self.joining = weights.linear("a.input_projection", params.n_mel, n)
        self.layers = [Layer(weights, f"a.blk.{il}", n, head, n_kernel, reach) for il in range(params.n_layer)]
        self.reach = reach
        self.load_middle(weights)
        self.kept = self.kept_layers(source)
        self.load_windows(source)

    def load_middle(self, weights: ProjectorWeights) -> None:
        """The matrix whose softmax weighs the columns of another one: keys, and values, of an attention."""
        n = self.params.n_embd
        count = weights.shape("a.enc_ctc_out.weight")[1]
        if count > MAX_CHARACTERS:
            raise FileFormatError(
                f"{self.path}: tensor 'a.enc_ctc_out.weight' has {count} rows, at most {MAX_CHARACTERS} are possible"
            )
        keys = weights.array("a.enc_ctc_out.weight", (n, count))
        key_bias = weights.array("a.enc_ctc_out.bias", (count,))
        values = weights.array("a.enc_ctc_out_mid.weight", (count, n)).T + weights.array("a.enc_ctc_out_mid.bias", (n,))
        self.middle = Linear(value_of(keys, "a.enc_ctc_out.weight"), value_of(key_bias, "a.enc_ctc_out.bias"))
        self.columns = value_of(values, "a.enc_ctc_out_mid.weight").reshape(self.params.n_embd, 1, count)
        self.same = value_of(np.eye(count, dtype=np.float32)).reshape(count, 1, count)

    def kept_layers(self, source: SoundSource) -> list[int]:
        """Layers, from 1 on, whose states stand before the last ones; 0 is what the first reads."""
        found = integers(source.keys, "feature_layer", part=PART)
        if any(not 0 <= il < self.params.n_layer for il in found):
            raise FileFormatError(f"{self.path}: clip.audio.feature_layer {found} of {self.params.n_layer} layers")
        return found

    def load_windows(self, source: SoundSource) -> None:
        """The Q-Former."""
        weights, keys = source.weights, source.keys
        self.window = size(keys, "projector.window_size", most=MAX_WINDOW, part=PART)
        self.n_queries = self.window // size(keys, "projector.downsample_rate", most=self.window, part=PART)
        n = weights.shape("a.proj_query")[0]
        self.n_heads = size(keys, "projector.head_count", part=PART)
        if n % self.n_heads:
            raise FileFormatError(f"{self.path}: clip.audio.projector.head_count {self.n_heads} of {n} elements")
        self.query = weights.table("a.proj_query", (n, self.n_queries))
        self.query_norm = weights.norm("a.proj_norm", n)
        numbers = [int(found[1]) for found in map(WINDOW_LAYER.match, weights.gguf.tensors) if found]
        count = min(max(numbers, default=0) + 1, MAX_LAYERS)
        n_state = self.params.n_embd * (1 + len(self.kept))
        self.window_layers = [WindowLayer(weights, f"a.proj_blk.{i}", n, n_state) for i in range(count)]
        self.projection = weights.linear("a.proj_linear", n)

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    @property
    def n_frame_elements(self) -> int:
        return self.params.n_mel

    @staticmethod
    def n_states(n_samples: int) -> int:
        """States of a sound; a frame that is left over is in none."""
        return max((n_samples // HOP + 1) // FRAMES, 1)

    def n_rows(self, n_samples: int) -> int:
        n = self.n_states(n_samples)
        return sum(-(-min(PIECE, n - start) // self.window) for start in range(0, n, PIECE)) * self.n_queries

    def pieces(self, samples: Samples) -> list[NDArray[np.float32]]:
        n = self.n_states(len(samples))
        line = np.pad(samples, N_FFT // 2, mode="reflect")
        n_frames = max(len(samples) // HOP + 1, FRAMES * n)  # the one that is left over may be the loudest
        powers = centred_powers(line, n_frames, hann(WINDOW), htk_filters(self.params.n_mel // FRAMES, N_FFT))
        states = loudness(powers)[: FRAMES * n].reshape(n, -1)
        return [states[start : start + PIECE] for start in range(0, n, PIECE)]

    def build(self, b: PictureGraph) -> Value:
        g, middle = b.graph, self.params.n_layer // 2
        blocks = Blocks(b, b.n_patches, self.block, self.params.head_size)
        x = b.linear(self.joining, b.patches)
        kept = {0: x}
        for number, layer in enumerate(self.layers, start=1):
            x = half_network(b, layer.first, x)
            x = g.add(x, blocks.attention(b, layer, b.layer_norm(layer.attn_norm, x, EPS), self.reach))
            x = convolution(b, layer, x)
            x = kept[number] = b.layer_norm(layer.out_norm, half_network(b, layer.last, x), EPS)
            if number == middle:
                x = g.add(x, self.said(b, x))
        return self.windowed(b, b.side_by_side([*(kept[number] for number in self.kept), x]))

    def said(self, b: PictureGraph, x: Value) -> Value:
        """What the middle layer says of characters, as states [D, T]."""
        logits = b.linear(self.middle, x)
        return b.attention(logits.reshape(logits.shape[0], 1, logits.shape[1]), self.same, self.columns, scale=1.0)

    def windowed(self, b: PictureGraph, x: Value) -> Value:
        """Rows of every window of states [D, T], behind the last of which are zeros."""
        g, count = b.graph, -(-x.shape[1] // self.window)
        states = g.new(x.shape[0], count * self.window)
        g.copy(x, states.slice(1, 0, x.shape[1]))
        if missing := count * self.window - x.shape[1]:
            g.copy(b.floats(np.zeros((missing, x.shape[0]))), states.slice(1, x.shape[1], missing))
        places = np.tile(np.arange(self.n_queries), count)
        rows = g.get_rows(b.layer_norm(self.query_norm, self.query, WINDOW_EPS), b.indices(places))
        own = ranges_of(np.full(count, self.n_queries))
        ends = np.repeat(np.arange(1, count + 1) * self.window, self.n_queries)
        whole = np.stack([ends - self.window, ends], axis=1)
        for layer in self.window_layers:
            rows = self.attended(b, layer.own, rows, rows, own)
            rows = self.attended(b, layer.cross, rows, states, whole)
            inner = b.activated(b.linear(layer.up, rows), "gelu_erf")
            rows = b.layer_norm(layer.norm, g.add(rows, b.linear(layer.down, inner)), WINDOW_EPS)
        return b.linear(self.projection, rows)

    def attended(
        self,
        b: PictureGraph,
        parts: tuple[Linear, Linear, Linear, Linear, Norm],
        rows: Value,
        seen: Value,
        ranges: NDArray[np.integer],
    ) -> Value:
        """Rows and what they see of others, normed."""
        q, k, v, out, norm = parts
        head = rows.shape[0] // self.n_heads
        heads = (split_heads(b.linear(part, x), head) for part, x in ((q, rows), (k, seen), (v, seen)))
        found = b.linear(out, b.attention(*heads, scale=head**-0.5, ranges=ranges))
        return b.layer_norm(norm, b.graph.add(rows, found), WINDOW_EPS)


class Blocks:
    """Blocks of consecutive states, each of which sees itself; what all layers share of them.

    What a query has for every place of its block stands behind its elements, and behind those of a key which place it
    has, so that one product is both parts of a score.
    """

    def __init__(self, b: PictureGraph, n: int, size: int, head: int) -> None:
        self.n, self.head, self.size = n, head, min(size, n)
        wanted = head + self.size
        self.width, self.n_value = next(((k, v) for k, v in WIDTHS if k >= wanted and v >= head), (wanted, head))
        place = np.arange(n) % self.size
        named = np.zeros((n, self.width - head), np.float32)
        named[np.arange(n), place] = 1
        self.named = b.floats(named).reshape(self.width - head, 1, n)
        ends = np.minimum(np.arange(n) // self.size * self.size + self.size, n)
        self.ranges = np.stack([np.arange(n) // self.size * self.size, ends], axis=1)
        self.count = -(-n // self.size)
        order = np.arange(self.count * self.size).reshape(self.count, self.size).T.reshape(-1)
        self.order = b.indices(np.where(order < n, order, -1))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        self.back = b.indices(back[:n])

    def attention(self, b: PictureGraph, layer: Layer, x: Value, reach: int) -> Value:
        """Attention of x [D, n], behind its output matrix."""
        g, d, scale = b.graph, self.head, self.head**-0.5
        heads = x.shape[0] // d
        q, k, v = (b.linear(part, x) for part in (layer.q, layer.k, layer.v))
        query, key = (self.widened(b, part, self.width) for part in (q, k))
        for head in range(heads):
            g.copy(self.named, key.slice(1, head, 1).slice0(d, self.width - d))
        known = self.distances(b, q, layer.distances, reach)
        g.copy(known, query.slice0(d, self.size))
        if rest := self.width - d - self.size:
            zeros = b.floats(np.zeros((self.n, heads, rest)))
            g.copy(zeros, query.slice0(d + self.size, rest))
        value = split_heads(v, d)
        if self.n_value > d:
            value = self.widened(b, v, self.n_value)
            g.copy(b.floats(np.zeros((self.n, heads, self.n_value - d))), value.slice0(d, self.n_value - d))
        found = b.attention(query, key, value, scale=scale, ranges=self.ranges).reshape(self.n_value, heads, self.n)
        return b.linear(layer.out, g.copy(found.slice0(0, d), g.new(d, heads, self.n)).reshape(d * heads, self.n))

    def widened(self, b: PictureGraph, x: Value, n: int) -> Value:
        """Heads f32 [n, H, T] that begin with those of x [D, T]."""
        heads = x.shape[0] // self.head
        wide = b.graph.new(n, heads, self.n)
        b.graph.copy(split_heads(x, self.head), wide.slice0(0, self.head))
        return wide

    def distances(self, b: PictureGraph, q: Value, table: NDArray[np.float32], reach: int) -> Value:
        """Products f32 [size, H, T] of every head of q [D, T] with the vectors of its distances to all places of its
        block."""
        g, d, size = b.graph, self.head, self.size
        heads = q.shape[0] // d
        rows = g.get_rows(q, self.order)
        vectors = b.floats(table[reach + size - 1 : reach - size : -1])
        found = g.new(size * heads, self.count * size)
        for i in range(size):
            part = rows.slice(1, i * self.count, self.count).reshape(d, heads * self.count)
            dst = found.slice(1, i * self.count, self.count).reshape(size, heads * self.count)
            g.mul_mat(vectors.slice(1, size - 1 - i, size), part, dst=dst)
        return g.get_rows(found, self.back).reshape(size, heads, self.n)
