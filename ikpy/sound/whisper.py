"""Encoders like that of Whisper (arXiv:2212.04356) and the projectors behind them.

Pieces of 30 seconds, silence behind the last, become spectrograms of 3000 frames; two convolutions, of which the second
takes every other frame, learned positions, layers, a norm.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.sound.params import PART, SoundParams
from ikpy.sound.projector import SoundProjector, SoundSource
from ikpy.sound.samples import Samples
from ikpy.sound.spectrogram import HOP, whisper_spectrogram
from ikpy.vision.encoder import Rotate, VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import ranges_of, turned
from ikpy.vision.params import size
from ikpy.vision.weights import ProjectorWeights, value_of

N_FRAMES = 3000
"""Of a piece."""
WINDOW = 200
"""Frames that Qwen2.5-Omni hears by themselves."""
LEAST_FRAMES = 3
"""That become a row."""
KERNEL = 3
MAX_STACK = 64
GLM_EPS, ULTRAVOX_EPS = 1e-5, 1e-6
ROPE_BASE = 10000.0


def neighbours(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """Every frame [n, d] with the one before and the one behind it, [n, d * 3], as filters are stored."""
    around = np.pad(frames, ((1, 1), (0, 0)))
    return np.lib.stride_tricks.sliding_window_view(around, KERNEL, axis=0).reshape(len(frames), -1)


class Front:
    """The convolutions and the positions behind them, unless queries and keys are rotated instead."""

    def __init__(self, weights: ProjectorWeights, params: SoundParams, *, positions: bool = True) -> None:
        n, n_in = params.n_embd, KERNEL * params.n_mel
        name = "a.conv1d.1.weight"
        first = weights.source.take(name, (KERNEL, params.n_mel, n), (n_in, n))
        self.first = first.reshape(n_in, n)
        filters = weights.array("a.conv1d.2.weight", (KERNEL, n, n))
        self.second = value_of(filters.transpose(0, 2, 1).reshape(n, -1), "a.conv1d.2.weight")
        self.biases = [weights.table(f"a.conv1d.{i}.bias", (n,), (1, n)).reshape(n) for i in (1, 2)]
        self.zeros = value_of(np.zeros(n, np.float32), "a.conv1d.2.zeros")
        self.positions = self._read_positions(weights, n) if positions else None

    @staticmethod
    def _read_positions(weights: ProjectorWeights, n: int) -> Value:
        name = "a.position_embd.weight"
        n_positions = weights.shape(name)[1]
        if n_positions < N_FRAMES // 2:
            raise FileFormatError(f"{weights.gguf.path}: {name} has {n_positions} positions, not {N_FRAMES // 2}")
        return weights.table(name, (n, n_positions)).slice(1, 0, N_FRAMES // 2)

    def build(self, b: PictureGraph, start: int, n: int) -> Value:
        """f32 [D, half of n] of n frames from one on, which have zeros around them."""
        g, d, half = b.graph, self.zeros.shape[0], (n + 1) // 2
        x = b.activated(g.mul_mat(self.first, b.patches.slice(1, start, n), self.biases[0]), "gelu_erf")
        around = g.new(d, n + 1 + n % 2)
        for place in (0, n + 1)[: 1 + n % 2]:
            g.copy(self.zeros.reshape(d, 1), around.slice(1, place, 1))
        g.copy(x, around.slice(1, 1, n))
        windows = g.copy(around.view((KERNEL * d, half), (2 * around.strides[1],)), g.new(KERNEL * d, half))
        x = b.activated(g.mul_mat(self.second, windows, self.biases[1]), "gelu_erf")
        return x if self.positions is None else g.add(x, self.positions.slice(1, 0, half))


class SoundTransformer(VisionTransformer):
    """Layers under a.*; pairs: of neighbours behind them the mean is taken, before the norm."""

    def __init__(self, weights: ProjectorWeights, params: SoundParams, *, pairs: bool = False) -> None:
        super().__init__(weights, params, prefix="a")
        self.pairs = pairs

    def behind(self, b: PictureGraph, x: Value) -> Value:
        if self.pairs:
            even, odd = (x.view((x.shape[0], x.shape[1] // 2), (2 * x.strides[1],), i * x.strides[1]) for i in (0, 1))
            x = b.graph.scale(b.graph.add(even, odd), 0.5)
        return super().behind(b, x)


class WhisperProjector(SoundProjector):
    """Rows for whole pieces: what follows the sound is heard as silence. rotates: instead of adding positions."""

    pairs = False
    rotates = False

    def load(self, source: SoundSource) -> None:
        self.front = Front(source.weights, self.params, positions=not self.rotates)
        self.tower = SoundTransformer(source.weights, self.params, pairs=self.pairs)
        self.load_projector(source)

    def load_projector(self, source: SoundSource) -> None:
        """Takes what follows the layers."""
        raise NotImplementedError

    def projected(self, b: PictureGraph, x: Value) -> Value:
        """The rows of the text model for x [D, n]."""
        raise NotImplementedError

    @property
    def n_frame_elements(self) -> int:
        return KERNEL * self.params.n_mel

    @staticmethod
    def n_pieces(n_samples: int) -> int:
        """Of a sound; one of whole pieces is followed by silence."""
        return (n_samples // HOP + 1) // N_FRAMES + 1

    def n_rows(self, n_samples: int) -> int:
        return self.n_pieces(n_samples) * self.n_piece_rows

    @property
    def n_piece_rows(self) -> int:
        """Rows of a piece."""
        return N_FRAMES // 2 // (2 if self.pairs else 1)

    def pieces(self, samples: Samples) -> Iterable[NDArray[np.float32]]:
        n = N_FRAMES * self.n_pieces(len(samples))
        frames = whisper_spectrogram(samples, self.params.n_mel, n)
        return (neighbours(frames[start : start + N_FRAMES]) for start in range(0, n, N_FRAMES))

    def build(self, b: PictureGraph) -> Value:
        x = self.front.build(b, 0, b.n_patches)
        return self.projected(b, self.tower.layers(b, x, rotate=self.rotation(b, x.shape[1])))

    def rotation(self, b: PictureGraph, n: int) -> Rotate | None:
        """Rotates queries and keys of n states."""
        return None


class Qwen2AudioProjector(WhisperProjector):
    """Qwen2-Audio (arXiv:2407.10759): one matrix behind means of pairs."""

    begin = "<|audio_bos|>"
    end = "<|audio_eos|>"
    pairs = True

    def load_projector(self, source: SoundSource) -> None:
        self.matrix = source.weights.linear("mm.a.fc", self.params.n_embd)

    @property
    def n_out(self) -> int:
        return self.matrix.n_out

    def projected(self, b: PictureGraph, x: Value) -> Value:
        return b.linear(self.matrix, x)


class Qwen25OmniProjector(Qwen2AudioProjector):
    """Qwen2.5-Omni (arXiv:2503.20215): every two seconds are heard by themselves, and no silence behind the sound.

    llama.cpp hears it as Qwen2-Audio does, which is not how the model is trained.
    """

    def n_rows(self, n_samples: int) -> int:
        n = max(n_samples // HOP, LEAST_FRAMES)
        lengths = (min(N_FRAMES, n - start) for start in range(0, n, N_FRAMES))
        return sum(int(self.states_of(length).sum()) // 2 for length in lengths if length >= LEAST_FRAMES)

    @staticmethod
    def states_of(n: int) -> NDArray[np.int64]:
        """States of every window of n frames."""
        return np.array([(min(WINDOW, n - start) + 1) // 2 for start in range(0, n, WINDOW)])

    def pieces(self, samples: Samples) -> list[NDArray[np.float32]]:
        n = max(len(samples) // HOP, LEAST_FRAMES)
        frames = whisper_spectrogram(samples, self.params.n_mel, n)
        parts = [neighbours(frames[start : start + WINDOW]) for start in range(0, n, WINDOW)]
        n_parts = N_FRAMES // WINDOW
        found = [np.concatenate(parts[start : start + n_parts]) for start in range(0, len(parts), n_parts)]
        return [frames for frames in found if len(frames) >= LEAST_FRAMES]

    def build(self, b: PictureGraph) -> Value:
        g, lengths = b.graph, [min(WINDOW, b.n_patches - start) for start in range(0, b.n_patches, WINDOW)]
        halves = self.states_of(b.n_patches)
        x = g.new(self.params.n_embd, int(halves.sum()))
        for i, n in enumerate(lengths):
            g.copy(self.front.build(b, i * WINDOW, n), x.slice(1, i * WINDOW // 2, int(halves[i])))
        ranges = ranges_of(halves)
        return self.projected(b, self.tower.layers(b, x, ranges=lambda layer: ranges))


class MusicFlamingoProjector(WhisperProjector):
    """Audio Flamingo 3 (arXiv:2507.08128) and Music Flamingo (arXiv:2511.10289): two matrices behind means of pairs."""

    begin = "<sound>"
    pairs = True

    def load_projector(self, source: SoundSource) -> None:
        self.mlp = source.weights.mlp("mm.a.mlp.1", "mm.a.mlp.2", self.n_joined)

    @property
    def n_joined(self) -> int:
        """Elements of what the first matrix reads."""
        return self.params.n_embd

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    def projected(self, b: PictureGraph, x: Value) -> Value:
        return b.mlp(self.mlp, x, "gelu_erf")


class StackedProjector(WhisperProjector):
    """So many consecutive states as the file says become one row; what is left over at the end does not count."""

    def load(self, source: SoundSource) -> None:
        self.stack = size(source.keys, "projector.stack_factor", most=MAX_STACK, part=PART)
        super().load(source)

    @property
    def n_piece_rows(self) -> int:
        return N_FRAMES // 2 // self.stack

    @property
    def n_joined(self) -> int:
        """Elements of the states of a row."""
        return self.params.n_embd * self.stack

    def joined(self, x: Value) -> Value:
        """Consecutive states [D, n] side by side."""
        n = x.shape[1] // self.stack
        return x.slice(1, 0, n * self.stack).reshape(self.n_joined, n)


class VoxtralProjector(StackedProjector):
    """Voxtral (arXiv:2507.13264): two matrices. llama.cpp takes means of pairs before, which the model does not."""

    begin = "[BEGIN_AUDIO]"

    def load_projector(self, source: SoundSource) -> None:
        self.mlp = source.weights.mlp("mm.a.mlp.1", "mm.a.mlp.2", self.n_joined)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    def projected(self, b: PictureGraph, x: Value) -> Value:
        return b.mlp(self.mlp, self.joined(x), "gelu_erf")


class GlmaProjector(StackedProjector):
    """GLM-ASR: a norm and two matrices; a row of the file before and behind those of a piece.

    Neighbouring elements of the first half of a head rotate. llama.cpp adds the positions of the file instead, which
    the model does not use.
    """

    rotates = True

    @property
    def n_piece_rows(self) -> int:
        return super().n_piece_rows + len(self.ends)

    def rotation(self, b: PictureGraph, n: int) -> Rotate:
        n_pairs = self.params.head_size // 4
        table = b.floats(turned(np.arange(n), ROPE_BASE ** -(np.arange(n_pairs) / n_pairs)))
        return lambda b, heads: b.graph.rope(heads, table, neox=False)

    def load_projector(self, source: SoundSource) -> None:
        weights = source.weights
        self.norm = weights.norm("mm.a.norm_pre", self.params.n_embd)
        self.mlp = weights.mlp("mm.a.mlp.1", "mm.a.mlp.2", self.n_joined)
        self.ends = [weights.table(f"v.{name}", (self.n_out,)) for name in ("boi", "eoi")]

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    def projected(self, b: PictureGraph, x: Value) -> Value:
        g = b.graph
        x = b.mlp(self.mlp, self.joined(b.layer_norm(self.norm, x, GLM_EPS)), "gelu_erf")
        rows = g.new(self.n_out, x.shape[1] + 2)
        for place, part in (
            (0, self.ends[0].reshape(self.n_out, 1)),
            (1, x),
            (x.shape[1] + 1, self.ends[1].reshape(self.n_out, 1)),
        ):
            g.copy(part, rows.slice(1, place, part.shape[1]))
        return rows


class UltravoxProjector(StackedProjector):
    """Ultravox: two matrices with gates between them, a norm before each."""

    def load_projector(self, source: SoundSource) -> None:
        weights = source.weights
        self.norm_pre = weights.table("mm.a.norm_pre.weight", (self.n_joined,))
        self.up = weights.linear("mm.a.mlp.1", self.n_joined)
        if self.up.n_out % 2:
            raise FileFormatError(f"{self.path}: tensor 'mm.a.mlp.1.weight' has {self.up.n_out} rows, no two halves")
        self.norm_mid = weights.table("mm.a.norm_mid.weight", (self.up.n_out // 2,))
        self.down = weights.linear("mm.a.mlp.2", self.up.n_out // 2)

    @property
    def n_out(self) -> int:
        return self.down.n_out

    def projected(self, b: PictureGraph, x: Value) -> Value:
        g, half = b.graph, self.up.n_out // 2
        x = b.linear(self.up, g.rms_norm(self.joined(x), self.norm_pre, ULTRAVOX_EPS))
        x = g.gated(x.slice0(half, half), x.slice0(0, half), "silu")
        return b.linear(self.down, g.rms_norm(x, self.norm_mid, ULTRAVOX_EPS))


class MeralionProjector(StackedProjector):
    """MERaLiON 2 (arXiv:2412.09818): a norm of every state, a matrix over states side by side, a gated network.

    llama.cpp norms the states of a row together.
    """

    def load_projector(self, source: SoundSource) -> None:
        weights = source.weights
        self.norm = weights.norm("mm.a.norm_pre", self.params.n_embd)
        self.first = weights.linear("mm.a.mlp.0", self.n_joined)
        self.gate = weights.linear("mm.a.mlp.1", self.first.n_out)
        self.pool = weights.linear("mm.a.mlp.2", self.first.n_out, self.gate.n_out)
        self.last = weights.linear("mm.a.mlp.3", self.gate.n_out)

    @property
    def n_out(self) -> int:
        return self.last.n_out

    def projected(self, b: PictureGraph, x: Value) -> Value:
        x = self.joined(b.layer_norm(self.norm, x, self.params.eps))
        x = b.activated(b.linear(self.first, x), "silu")
        return b.linear(self.last, b.graph.gated(b.linear(self.gate, x), b.linear(self.pool, x), "silu"))
