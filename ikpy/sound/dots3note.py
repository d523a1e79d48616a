"""dots3 note: three convolutions over a minute, layers with gated networks whose queries and keys rotate in part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.sound.projector import SoundProjector, SoundSource
from ikpy.sound.samples import SAMPLE_RATE, Samples
from ikpy.sound.spectrogram import HOP, whisper_spectrogram
from ikpy.vision.convolution import filtered, halved, places_before, rows_before
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import turned
from ikpy.vision.weights import Linear, ProjectorWeights, value_of

PIECE = 60 * SAMPLE_RATE
"""Samples that are heard together."""
SECTION = 64
"""States that are made of frames at a time."""
N_CONVOLUTIONS = 3
ROPE_BASE = 10000.0
ADAPTER_EPS = 1e-5


def states_of(n: int) -> int:
    """States of n frames, and pitches of n."""
    for _ in range(N_CONVOLUTIONS):
        n = halved(n)
    return n


class Front:
    """The convolutions, and the matrix behind them."""

    def __init__(self, weights: ProjectorWeights, n_mel: int, n: int) -> None:
        self.n_mel, self.filters, n_in = n_mel, [], 1
        for i in range(1, 1 + N_CONVOLUTIONS):
            name = f"a.conv2d.{i}"
            n_out = weights.shape(f"{name}.weight")[-1]
            filters = weights.array(f"{name}.weight", (3, 3, n_in, n_out))  # of time, then of pitches
            matrix = value_of(filters.transpose(0, 3, 2, 1).reshape(n_out, 9 * n_in), name)
            bias = weights.table(f"{name}.bias", (n_out,), (1, 1, n_out)).reshape(n_out)
            self.filters.append(Linear(matrix, bias))
            n_in = n_out
        pitches, name = states_of(n_mel), "a.conv_out.weight"
        joined = weights.array(name, (n_in * pitches, n)).reshape(n, n_in, pitches)
        self.joining = value_of(joined.transpose(0, 2, 1).reshape(n, -1), name)

    def build(self, b: PictureGraph) -> Value:
        """States [D, n] of frames, some of them at a time."""
        n = states_of(b.n_patches)
        x = b.graph.new(self.joining.shape[1], n)
        for start in range(0, n, SECTION):
            states = range(start, min(start + SECTION, n))
            b.graph.copy(self.section(b, states), x.slice(1, start, len(states)))
        return x

    def section(self, b: PictureGraph, states: range) -> Value:
        """Some of the states."""
        first = halved(b.n_patches)
        rows = [states, rows_before(states, halved(first))]
        rows.append(rows_before(rows[-1], first))
        x, known, columns = b.patches.reshape(1, b.n_patches * self.n_mel), range(b.n_patches), self.n_mel
        for layer, wanted in zip(self.filters, reversed(rows), strict=True):
            places = places_before(wanted, known, columns).reshape(-1)
            x = b.activated(filtered(b, layer, x, places), "gelu_erf")
            known, columns = wanted, halved(columns)
        return b.graph.mul_mat(self.joining, x.reshape(x.shape[0] * columns, len(states)))


class Dots3NoteAudioProjector(SoundProjector):
    """A norm and two matrices behind the layers. Of a sound that ends within the first frame of a state nothing is
    made of this frame, as in llama.cpp."""

    begin = "<|audio_comp_start|>"
    end = "<|audio_comp_end|>"
    most_frames = PIECE // HOP

    def load(self, source: SoundSource) -> None:
        weights, n = source.weights, self.params.n_embd
        self.front = Front(weights, self.params.n_mel, n)
        self.tower = VisionTransformer(weights, replace(self.params, activation="silu"), rms=True, prefix="a")
        for il, block in enumerate(self.tower.blocks):
            if block.gate is None:
                raise FileFormatError(f"{self.path}: tensor 'a.blk.{il}.ffn_gate.weight' not found")
        if self.tower.post_norm is None:
            raise FileFormatError(f"{self.path}: tensor 'a.post_ln.weight' not found")
        self.norm = weights.norm("mm.a.norm_pre", n)
        self.mlp = weights.mlp("mm.a.mlp.1", "mm.a.mlp.3", n)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    @property
    def n_frame_elements(self) -> int:
        return self.params.n_mel

    def n_rows(self, n_samples: int) -> int:
        lengths = [min(PIECE, n_samples - start) for start in range(0, max(n_samples, 1), PIECE)]
        return sum(states_of(max(length // HOP, 1)) for length in lengths)

    def pieces(self, samples: Samples) -> list[NDArray[np.float32]]:
        parts = [samples[start : start + PIECE] for start in range(0, max(len(samples), 1), PIECE)]
        return [self.heard(part) for part in parts]

    def heard(self, samples: Samples) -> NDArray[np.float32]:
        """Frames of a piece, levels being those of all that lie in it."""
        n = max(len(samples) // HOP, 1)
        n_known = min(n + 3, PIECE // HOP)
        line = np.pad(samples, (0, PIECE - len(samples)))
        return whisper_spectrogram(line, self.params.n_mel, n_known, mirrored=True)[:n]

    def build(self, b: PictureGraph) -> Value:
        x, n_pairs = self.front.build(b), self.params.head_size // 4
        table = b.floats(turned(np.arange(x.shape[1]), ROPE_BASE ** -(np.arange(n_pairs) / n_pairs)))
        x = self.tower.layers(b, x, rotate=lambda b, heads: b.graph.rope(heads, table, neox=True))
        return b.mlp(self.mlp, b.layer_norm(self.norm, x, ADAPTER_EPS), "gelu_erf")
