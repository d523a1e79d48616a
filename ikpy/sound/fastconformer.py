"""FastConformers (arXiv:2305.05084): LFM2-Audio and the encoder of Parakeet.

Three convolutions take every eighth frame and pitch, the last two of every channel by itself with a matrix behind. All
states see each other: score(i, j) = ((q_i + u) k_j + (q_i + v) W s(i - j)) / sqrt(d) (arXiv:1901.02860) with sines and
cosines s of distances. As sines of differences are products of sines and cosines, what (q_i + v) W has for them, turned
by i, stands behind the elements of a query, and cosines and sines of j behind those of a key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.blocks import split_heads
from ikpy.sound.conformer import EPS, ConformerLayer, convolution, half_network
from ikpy.sound.params import PART
from ikpy.sound.projector import SoundProjector, SoundSource
from ikpy.sound.samples import Samples
from ikpy.sound.spectrogram import HOP, WINDOW, centred_powers, hann, mel_filters
from ikpy.vision.convolution import convolution as filters_of
from ikpy.vision.convolution import filtered, halved, places_before, rows_before
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import turned
from ikpy.vision.params import size
from ikpy.vision.weights import Linear, ProjectorWeights, value_of

N_FFT = 512
PREEMPHASIS = 0.97
LEAST_POWER = 2.0**-24
LEAST_DEVIATION = 1e-5
PIECE = 11999
"""Frames that are heard together, about two minutes; the last state of one that goes on is not full."""
SECTION = 64
"""States that are made of frames at a time."""
SUBSAMPLING = 8
"""Frames of a state."""
LONGEST_WAVE = 10000.0
LAST_EPS = 1e-5


def states_of(n: int) -> int:
    """States of n frames, and pitches of n."""
    return halved(halved(halved(n)))


def levels(samples: Samples, window: NDArray[np.float64], filters: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logarithms [n, n_mel] of powers of pitches, each in deviations from its mean. Behind whole frames lies another
    one, of zeros, which counts in neither."""
    n, n_mel = len(samples) // HOP, len(filters)
    line = samples.astype(np.float32)
    line = np.concatenate([line[:1], line[1:] - np.float32(PREEMPHASIS) * line[:-1]])
    line = np.pad(line, N_FFT // 2)
    found = np.zeros((n + 1, n_mel), np.float32)
    if n:
        found[:n] = centred_powers(line, n, window, filters)
        for pitch in found[:n].T:  # in double precision, one by one: an hour of all takes much memory
            known = np.log(pitch.astype(np.float64) + LEAST_POWER)
            deviation = known.std(ddof=1) if n > 1 else 0.0
            pitch[:] = (known - known.mean()) / (deviation + LEAST_DEVIATION)
    return found


class Layer(ConformerLayer):
    """Weights of a layer. content, place: what is added to queries [D] for keys and for distances; waves: W as a matrix
    [d, D] for every head, cosines before sines, whose signs are turned."""

    def __init__(self, weights: ProjectorWeights, prefix: str, n: int, head: int) -> None:
        super().__init__(weights, prefix, n)
        heads = n // head
        self.content, self.place = (
            weights.table(f"{prefix}.pos_bias_{part}", (head, heads)).reshape(n) for part in "uv"
        )
        name = f"{prefix}.linear_pos.weight"
        matrix = weights.array(name, (n, n)).reshape(heads, head, n // 2, 2)
        pairs = np.stack([matrix[..., 1], -matrix[..., 0]], axis=-1).reshape(heads, head, n)
        self.waves = [value_of(pairs[i].T, f"{name} ({i})") for i in range(heads)]


class Front:
    """The convolutions and the matrix behind them."""

    def __init__(self, weights: ProjectorWeights, n_mel: int, n: int) -> None:
        self.n_mel = n_mel
        self.first = filters_of(weights, "a.conv1d.0", 1)
        channels = self.first.n_out
        self.each, self.mixing = [], []
        for i in (2, 5):
            name = f"a.conv1d.{i}"
            taps = weights.array(f"{name}.weight", (3, 3, 1, channels)).reshape(channels, 9)
            self.each.append(
                ([value_of(taps[:, j], f"{name} ({j})") for j in range(9)], bias_of(weights, name, channels))
            )
            name = f"a.conv1d.{i + 1}"
            matrix = weights.source.take(f"{name}.weight", (1, 1, channels, channels), (channels, channels))
            self.mixing.append(Linear(matrix.reshape(channels, channels), bias_of(weights, name, channels)))
        pitches = states_of(n_mel)
        joined = weights.array("a.pre_encode.out.weight", (channels * pitches, n)).reshape(n, channels, pitches)
        turned_about = joined.transpose(0, 2, 1).reshape(n, -1)
        self.silence = weights.table("a.pre_encode.out.bias", (n,))
        self.joining = Linear(value_of(turned_about, "a.pre_encode.out"), self.silence)

    def build(self, b: PictureGraph) -> Value:
        """States [D, n] of frames, some of them at a time."""
        g, n = b.graph, states_of(b.n_patches)
        x = g.new(self.joining.weight.shape[1], n)
        for start in range(0, n, SECTION):
            states = range(start, min(start + SECTION, n))
            g.copy(self.section(b, states), x.slice(1, start, len(states)))
        return x

    def section(self, b: PictureGraph, states: range) -> Value:
        """Some of the states."""
        g, counts, columns = b.graph, [b.n_patches], self.n_mel
        for _ in range(2):
            counts.append(halved(counts[-1]))
        third = rows_before(states, counts[2])
        second = rows_before(third, counts[1])
        places = places_before(second, range(counts[0]), columns)
        x = g.unary(filtered(b, self.first, b.patches.reshape(1, b.n_patches * columns), places.reshape(-1)), "relu")
        for (taps, bias), mixing, (rows, before) in zip(
            self.each, self.mixing, ((third, second), (states, third)), strict=True
        ):
            columns = halved(columns)
            places = places_before(rows, before, columns)
            total: Value | None = None
            for i, tap in enumerate(taps):
                part = g.mul(g.get_rows(x, b.indices(places[:, i])), tap)
                total = part if total is None else g.add(total, part)
            assert total is not None
            x = g.unary(b.linear(mixing, g.add(total, bias)), "relu")
        return b.linear(self.joining, x.reshape(x.shape[0] * halved(columns), len(states)))


def bias_of(weights: ProjectorWeights, name: str, n: int) -> Value:
    """What is added to results of a convolution."""
    return weights.table(f"{name}.bias", (n,), (1, 1, n)).reshape(n)


class FastConformerProjector(SoundProjector):
    """Layers whose states all see each other."""

    most_frames = PIECE

    def load(self, source: SoundSource) -> None:
        weights, params = source.weights, self.params
        if params.n_embd % 2:
            raise FileFormatError(f"{self.path}: clip.audio.embedding_length is {params.n_embd}, not even")
        self.front = Front(weights, params.n_mel, params.n_embd)
        self.layers = [Layer(weights, f"a.blk.{il}", params.n_embd, params.head_size) for il in range(params.n_layer)]
        self.listen(weights)
        self.load_projection(weights)

    def listen(self, weights: ProjectorWeights) -> None:
        """The window and the pitches of spectrograms, which some files hold."""
        n_mel, n_bins = self.params.n_mel, N_FFT // 2 + 1
        window, pitches = "a.window", "a.mel_filters"
        known = weights.array(window, (WINDOW,)) if weights.has(window) else hann(WINDOW, periodic=False)
        self.hann = known.astype(np.float64)
        has_filters = weights.has(pitches)
        self.filters = weights.array(pitches, (n_bins, n_mel)) if has_filters else mel_filters(n_mel, N_FFT)

    def load_projection(self, weights: ProjectorWeights) -> None:
        """Takes what follows the layers."""
        raise NotImplementedError

    def projected(self, b: PictureGraph, x: Value) -> Value:
        """Rows of states."""
        raise NotImplementedError

    @property
    def n_frame_elements(self) -> int:
        return self.params.n_mel

    @staticmethod
    def n_frames(n_samples: int) -> int:
        """Frames that states are made of."""
        return n_samples // HOP + 1

    @staticmethod
    def n_silent(n_frames: int) -> int:
        """States behind those of so many frames, which the others do not see."""
        return 0

    def n_rows(self, n_samples: int) -> int:
        n = self.n_frames(n_samples)
        lengths = [min(PIECE, n - start) for start in range(0, n, PIECE)]
        return sum(states_of(length) + self.n_silent(length) for length in lengths)

    def pieces(self, samples: Samples) -> list[NDArray[np.float32]]:
        n = self.n_frames(len(samples))
        frames = levels(samples, self.hann, self.filters)[:n]
        return [frames[start : start + PIECE] for start in range(0, n, PIECE)]

    def build(self, b: PictureGraph) -> Value:
        g, x = b.graph, self.front.build(b)
        silent = self.n_silent(b.n_patches)
        if silent:
            x = b.with_row(self.front.silence, x.shape[1], lambda into: g.copy(x, into), last=True)
        distances = Distances(b, x.shape[1], self.params.n_embd, self.params.head_size, silent)
        for layer in self.layers:
            x = half_network(b, layer.first, x)
            x = g.add(x, distances.attention(b, layer, b.layer_norm(layer.attn_norm, x, EPS)))
            x = convolution(b, layer, x, silent)
            x = b.layer_norm(layer.out_norm, half_network(b, layer.last, x), EPS)
        return self.projected(b, x)


class Lfm2AudioProjector(FastConformerProjector):
    """LFM2-Audio: a norm and two matrices."""

    def load_projection(self, weights: ProjectorWeights) -> None:
        self.norm = weights.norm("mm.a.mlp.0", self.params.n_embd)
        self.mlp = weights.mlp("mm.a.mlp.1", "mm.a.mlp.3", self.params.n_embd)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    def projected(self, b: PictureGraph, x: Value) -> Value:
        return b.mlp(self.mlp, b.layer_norm(self.norm, x, LAST_EPS), "gelu_erf")


class ParakeetProjector(FastConformerProjector):
    """Nemotron 3 Nano Omni: a norm and two matrices. The frame of zeros is not heard; a state of its own, which it is
    behind eighths that are full, sees the mean of all."""

    begin = "<so_start>"
    end = "<so_end>"

    def load(self, source: SoundSource) -> None:
        size(source.keys, "subsampling_factor", default=SUBSAMPLING, least=SUBSAMPLING, most=SUBSAMPLING, part=PART)
        super().load(source)

    def load_projection(self, weights: ProjectorWeights) -> None:
        self.norm = weights.table("mm.a.norm_pre.weight", (self.params.n_embd,))
        self.mlp = weights.mlp("mm.a.mlp.1", "mm.a.mlp.2", self.params.n_embd)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    @staticmethod
    def n_frames(n_samples: int) -> int:
        return max(n_samples // HOP, 1)

    @staticmethod
    def n_silent(n_frames: int) -> int:
        return states_of(n_frames + 1) - states_of(n_frames)

    def projected(self, b: PictureGraph, x: Value) -> Value:
        return b.mlp(self.mlp, b.graph.rms_norm(x, self.norm, LAST_EPS), "relu_squared")


class Distances:
    """Attention of all states to each other by their distances; what all layers share of it. silent: the last states,
    which the others do not see and whose queries are zeros."""

    def __init__(self, b: PictureGraph, n: int, width: int, head: int, silent: int) -> None:
        self.n, self.head, self.width, self.silent = n, head, width, silent
        ends = np.where(np.arange(n) < n - silent, n - silent, n)
        self.ranges = np.stack([np.zeros(n, np.int64), ends], axis=1)
        rates = LONGEST_WAVE ** -(np.arange(width // 2) / (width // 2))
        self.turns = b.floats(turned(np.arange(n), rates))
        angles = np.arange(n)[:, None] * rates
        waves = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        self.waves = b.floats(waves.reshape(n, width)).reshape(width, 1, n)

    def attention(self, b: PictureGraph, layer: Layer, x: Value) -> Value:
        """Attention of x [D, n], behind its output matrix."""
        g, d, n = b.graph, self.head, self.n
        heads = x.shape[0] // d
        q, k, v = (b.linear(part, x) for part in (layer.q, layer.k, layer.v))
        query, key = (g.new(d + self.width, heads, n) for _ in range(2))
        g.copy(split_heads(g.add(q, layer.content), d), query.slice0(0, d))
        g.copy(split_heads(k, d), key.slice0(0, d))
        placed, known = g.add(q, layer.place), g.new(self.width, heads, n)
        for i, waves in enumerate(layer.waves):
            part = g.copy(placed.slice0(i * d, d), g.new(d, n))
            g.copy(g.mul_mat(waves, part).reshape(self.width, 1, n), known.slice(1, i, 1))
            g.copy(self.waves, key.slice(1, i, 1).slice0(d, self.width))
        g.copy(g.rope(known, self.turns, neox=False), query.slice0(d, self.width))
        if self.silent:
            g.copy(
                b.floats(np.zeros((self.silent, heads, d + self.width))), query.slice(2, n - self.silent, self.silent)
            )
        found = b.attention(query, key, split_heads(v, d), scale=d**-0.5, ranges=self.ranges)
        return b.linear(layer.out, found)
