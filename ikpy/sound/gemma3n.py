"""Gemma 3n: layers of the Universal Speech Model, of which every fourth state is kept, and rows of a table behind.

Two convolutions take every fourth frame and pitch; norms behind them are over all frames up to each. A piece of 30
seconds is 188 rows: where the sound ends earlier the others are the last row of the table. llama.cpp, whose files have
these tensors, does not use them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.sound.projector import SoundProjector, SoundSource
from ikpy.sound.samples import SAMPLE_RATE, Samples
from ikpy.sound.spectrogram import HOP, hann, htk_filters
from ikpy.sound.speech_model import EPS, Layer, Layout, behind
from ikpy.vision.convolution import halved
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.weights import ProjectorWeights

PIECE = 30 * SAMPLE_RATE
"""Samples that are heard together."""
ROWS = 188
"""Of a piece."""
WINDOW, N_FFT = 512, 1024
WHOLE = 128
"""Samples that pieces are whole multiples of, with silence behind."""
PREEMPHASIS = 0.97
LOWEST, HIGHEST = 125.0, 7600.0
FLOOR = 1e-5
"""Least strength of pitches."""
FRONT_EPS = 1e-3
MAX_CHANNELS = 1 << 10
BLOCK = 64
"""Frames that are convolved at a time."""
STEP = 4
"""Frames of a state, and states of a row."""
LAYOUT = Layout(
    attn_norm="ln1",
    attn_post_norm="ln2",
    distances="linear_pos",
    out_norm="layer_pre_norm",
    context=13,
    key_scale=1.0,
    query_scales=lambda stored: np.logaddexp(np.float32(0), stored),
)


class Front:
    """Convolutions over pairs of frames and pitches, which see two frames behind. As norms add up what came before,
    they are computed here, frame by frame."""

    def __init__(self, weights: ProjectorWeights, n_mel: int) -> None:
        self.filters, self.factors, n_in = [], [], 1
        for i in (0, 1):
            name = f"a.conv1d.{i}"
            n_out = weights.shape(f"{name}.weight")[-1]
            if n_out > MAX_CHANNELS:
                raise FileFormatError(
                    f"{weights.gguf.path}: tensor '{name}.weight' makes {n_out} channels, not 1 to {MAX_CHANNELS}"
                )
            filters = weights.array(f"{name}.weight", (3, 3, n_in, n_out))
            self.filters.append(np.ascontiguousarray(filters.transpose(1, 2, 3, 0)).reshape(9 * n_in, n_out))
            self.factors.append(weights.array(f"{name}.norm.weight", (n_out,)))
            n_in = n_out
        self.n_out = n_in * halved(halved(n_mel))

    def heard(self, levels: NDArray[np.float32]) -> NDArray[np.float32]:
        """What states are made of, [n / 4, n_out], of levels [n, n_mel]."""
        x = levels[:, :, None]
        for filters, factors in zip(self.filters, self.factors, strict=True):
            x = np.pad(x, ((0, 2), (1, 1), (0, 0)))
            windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(0, 1))[::2, ::2]
            rows, columns = windows.shape[:2]
            found = np.empty((rows, columns, filters.shape[1]), np.float32)
            for start in range(0, rows, BLOCK):
                part = windows[start : start + BLOCK]
                found[start : start + BLOCK] = (part.reshape(-1, len(filters)) @ filters).reshape(
                    len(part), columns, -1
                )
            x = np.maximum(normed(found) * factors, 0)
        return x.reshape(len(x), -1)


def normed(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x [n, ...] with the mean of all up to each place taken away, in deviations from these means up to there."""
    count = x[0].size * np.arange(1, len(x) + 1)
    each = (slice(None), *[None] * (x.ndim - 1))
    mean = np.cumsum(x.reshape(len(x), -1).sum(axis=1, dtype=np.float64)) / count
    x = x - mean[each].astype(np.float32)
    variance = np.cumsum((x.reshape(len(x), -1) ** 2).sum(axis=1, dtype=np.float64)) / count
    return x / np.sqrt(variance + FRONT_EPS)[each].astype(np.float32)


def levels(samples: Samples, n_mel: int) -> NDArray[np.float32]:
    """Natural logarithms [n, n_mel] of the strength of pitches in windows of 32 ms that lie in the sound."""
    windows = np.lib.stride_tricks.sliding_window_view(samples, WINDOW + 1)[::HOP]
    first = windows[:, :1] * np.float32(1 - PREEMPHASIS)
    rest = windows[:, 1:-1] - np.float32(PREEMPHASIS) * windows[:, :-2]
    strengths = np.abs(np.fft.rfft(np.concatenate([first, rest], axis=1) * hann(WINDOW), N_FFT)).astype(np.float32)
    return np.log(np.maximum(strengths @ htk_filters(n_mel, N_FFT, LOWEST, HIGHEST).T, np.float32(FLOOR)))


class Gemma3nAudioProjector(SoundProjector):
    """A norm, a matrix and a norm without factors, of rows and of the table."""

    begin = "\n\n<start_of_audio>"
    end = "<end_of_audio>\n\n"
    most_frames = STEP * ROWS

    def load(self, source: SoundSource) -> None:
        weights, params = source.weights, self.params
        n, head = params.n_embd, params.head_size
        self.front = Front(weights, params.n_mel)
        self.joining = weights.linear("a.pre_encode.out", self.front.n_out, n)
        self.layers = [Layer(weights, f"a.blk.{il}", n, head, LAYOUT) for il in range(params.n_layer)]
        self.norm = weights.table("mm.a.soft_emb_norm.weight", (n,))
        self.table_norm = weights.table("mm.a.hard_emb_norm.weight", (n,))
        name = "mm.a.embedding.weight"
        if weights.shape(name)[0] != n:
            raise FileFormatError(f"{self.path}: tensor '{name}' has rows of {weights.shape(name)[0]}, not {n}")
        count = weights.shape(name)[1]
        self.table, self.last = weights.matrix(name, n, count), count - 1
        self.projection = weights.linear("mm.a.input_projection", n)

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    @property
    def n_frame_elements(self) -> int:
        return self.front.n_out

    def n_rows(self, n_samples: int) -> int:
        return ROWS * max(-(-n_samples // PIECE), 1)

    def pieces(self, samples: Samples) -> list[NDArray[np.float32]]:
        parts = [samples[start : start + PIECE] for start in range(0, max(len(samples), 1), PIECE)]
        return [self.heard(part) for part in parts]

    def heard(self, samples: Samples) -> NDArray[np.float32]:
        """What states are made of that begin within a piece."""
        least = -(-(WINDOW + 1) // WHOLE) * WHOLE
        line = np.pad(samples, (0, max(-len(samples) % WHOLE, least - len(samples))))
        states = self.front.heard(levels(line, self.params.n_mel))
        return states[: max(-(-len(samples) // (HOP * STEP)), 1)]

    def build(self, b: PictureGraph) -> Value:
        g, x = b.graph, b.linear(self.joining, b.patches)
        for layer in self.layers:
            x = behind(b, layer, x, self.params.head_size)
        count = -(-x.shape[1] // STEP)
        kept = g.get_rows(x, b.indices(np.arange(count) * STEP))
        states = g.new(x.shape[0], ROWS)
        g.copy(g.rms_norm(kept, self.norm, EPS), states.slice(1, 0, count))
        if count < ROWS:
            others = g.get_rows(self.table, b.indices(np.full(ROWS - count, self.last)))
            g.copy(g.rms_norm(others, self.table_norm, EPS), states.slice(1, count, ROWS - count))
        return g.rms_norm(b.linear(self.projection, states), None, EPS)
