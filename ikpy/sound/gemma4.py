"""Gemma 4: layers of the Universal Speech Model; two convolutions take every fourth frame and pitch.

A state sees itself and the eleven before it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ikpy.graph.ir import Value
from ikpy.sound.projector import SoundProjector, SoundSource
from ikpy.sound.samples import SAMPLE_RATE, Samples
from ikpy.sound.spectrogram import HOP, htk_levels
from ikpy.sound.speech_model import EPS, Layer, Layout, behind
from ikpy.vision.convolution import convolution, convolved, halved
from ikpy.vision.graphs import PictureGraph

PIECE = 30 * SAMPLE_RATE
"""Samples that are heard together."""
WINDOW = 320
"""Samples of a frame; the first has silence in its first half."""
ROWS = 1024
"""That are made together of samples alone."""
FLOOR = 1e-3
"""Added to the strength of pitches."""
LAYOUT = Layout(
    attn_norm="attn_pre_norm",
    attn_post_norm="attn_post_norm",
    distances="attn_k_rel",
    out_norm="ln2",
    context=12,
    key_scale=math.log1p(math.e) / math.log(2),
    query_scales=lambda stored: stored,
)


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
        head = self.params.head_size
        self.layers = [Layer(weights, f"a.blk.{il}", n, head, LAYOUT) for il in range(self.params.n_layer)]
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
            x = behind(b, block, x, self.params.head_size)
        return b.linear(self.projection, g.rms_norm(b.linear(self.last, x), self.norm, EPS))


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
