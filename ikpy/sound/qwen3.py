"""Qwen3-Omni (arXiv:2509.17765) and Qwen3-ASR: three convolutions over every second, layers over eight of them.

A second is a picture of 100 frames, zeros behind the last ones; its 13 columns become states, numbered from 0 in each.
Rows of what lies behind the sound are left out, which llama.cpp keeps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.sound.projector import SoundProjector, SoundSource
from ikpy.sound.samples import Samples
from ikpy.sound.spectrogram import HOP, whisper_spectrogram
from ikpy.sound.whisper import SoundTransformer
from ikpy.vision.convolution import convolution, convolved, filtered, halved, neighbour_places
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.weights import value_of

SECOND = 100
"""Frames that are convolved together."""
PIECE = 800
"""Frames whose states see each other."""
N_CONVOLUTIONS = 3


def states_of(n: int) -> int:
    """States of n frames of a second."""
    for _ in range(N_CONVOLUTIONS):
        n = halved(n)
    return n


class Qwen3AudioProjector(SoundProjector):
    """Two matrices behind the layers."""

    begin = "<|audio_start|>"
    end = "<|audio_end|>"
    most_frames = PIECE

    def load(self, source: SoundSource) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters, n_in = [], 1
        for i in range(1, 1 + N_CONVOLUTIONS):
            self.filters.append(convolution(weights, f"a.conv2d.{i}", n_in))
            n_in = self.filters[-1].n_out
        n_pitches = states_of(self.params.n_mel)
        joined = weights.array("a.conv_out.weight", (n_in * n_pitches, n)).reshape(n, n_in, n_pitches)
        self.joining = value_of(joined.transpose(0, 2, 1).reshape(n, -1), "a.conv_out.weight")
        self.joining_bias = weights.vector("a.conv_out.bias", n)
        name, n_states = "a.position_embd.weight", states_of(SECOND)
        if weights.shape(name)[1] < n_states:
            raise FileFormatError(f"{self.path}: {name} has {weights.shape(name)[1]} positions, not {n_states}")
        self.positions = weights.table(name, (n, weights.shape(name)[1]))
        self.tower = SoundTransformer(weights, self.params)
        self.mlp = weights.mlp("mm.a.mlp.1", "mm.a.mlp.2", n)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    def n_rows(self, n_samples: int) -> int:
        n = max(n_samples // HOP, 1)
        return sum(states_of(min(SECOND, n - start)) for start in range(0, n, SECOND))

    def pieces(self, samples: Samples) -> list[NDArray[np.float32]]:
        n = max(len(samples) // HOP, 1)
        frames = whisper_spectrogram(samples, self.params.n_mel, n, mirrored=True)
        return [frames[start : start + PIECE] for start in range(0, n, PIECE)]

    @property
    def n_frame_elements(self) -> int:
        return self.params.n_mel

    def build(self, b: PictureGraph) -> Value:
        starts = range(0, b.n_patches, SECOND)
        counts = [states_of(min(SECOND, b.n_patches - start)) for start in starts]
        x, at = b.graph.new(self.params.n_embd, sum(counts)), 0
        for start, n in zip(starts, counts, strict=True):
            states = b.graph.add(self.second(b, start).slice(1, 0, n), self.positions.slice(1, 0, n))
            b.graph.copy(states, x.slice(1, at, n))
            at += n
        return b.mlp(self.mlp, self.tower.layers(b, x), "gelu_erf")

    def second(self, b: PictureGraph, start: int) -> Value:
        """States [D, 13] of the frames of a second from one on."""
        g, n_mel, size = b.graph, self.params.n_mel, (self.params.n_mel, SECOND)
        places = neighbour_places(*size)
        frame = start + places % SECOND
        inside = (places >= 0) & (frame < b.n_patches)
        places = np.where(inside, frame * n_mel + places // SECOND, -1).astype(np.int32)
        levels = b.patches.reshape(1, n_mel * b.n_patches)
        x = b.activated(filtered(b, self.filters[0], levels, places), "gelu_erf")
        for layer in self.filters[1:]:
            size = halved(size[0]), halved(size[1])
            x = b.activated(convolved(b, layer, x, size), "gelu_erf")
        n, pitches, states = x.shape[0], states_of(n_mel), states_of(SECOND)
        line = x.strides[1]
        columns = g.copy(x.view((n, pitches, states), (states * line, line)), g.new(n, pitches, states))
        return g.mul_mat(self.joining, columns.reshape(n * pitches, states), self.joining_bias)
