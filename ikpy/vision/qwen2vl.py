"""Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Ints, Limits, ranges_of, square_order, window_order
from ikpy.vision.grouped import GroupedTransformer
from ikpy.vision.native_size import NativeSizeProjector
from ikpy.vision.params import size
from ikpy.vision.projector import Source

WINDOW_PIXELS = 112
"""Side of a window of Qwen2.5-VL; files do not say it."""
OMNI_WORDS = "<|vision_bos|>", "<|vision_eos|>"


class QwenProjector(NativeSizeProjector):
    """Squares of patches are joined to rows, which two matrices bring to the size of the text model."""

    begin = "<|vision_start|>"
    end = "<|vision_end|>"

    def load_rest(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters = self.two_frames(weights)
        self.up = weights.linear("mm.0", n * self.merge**2)
        self.down = weights.linear("mm.2", self.up.n_out)

    @property
    def n_out(self) -> int:
        return self.down.n_out

    def read_limits(self, source: Source) -> Limits:
        return self.limits_of_all(source)

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return rows // self.merge, columns // self.merge

    def build(self, b: PictureGraph) -> Value:
        x = self.tower.layers(b, b.graph.mul_mat(self.filters, b.patches), rotate=self.rotation(b))
        return self.projected(b, self.up, self.down, self.joined(x))


class Qwen2VLProjector(QwenProjector):
    """Layers as those of CLIP; every patch sees the whole picture."""


class Qwen25VLProjector(QwenProjector):
    """RMSNorm and gated networks; but in every `pattern`-th layer patches see their windows only.

    Squares reach the encoder window by window, so that what a patch sees is one stretch.
    """

    rms = True
    bias: Value | None = None
    """Of the patches."""

    def load_rest(self, source: Source) -> None:
        super().load_rest(source)
        self.pattern = size(source.keys, "n_wa_pattern", least=0)
        self.window = max(WINDOW_PIXELS // self.square, 1)

    def windows(self, rows: int, columns: int) -> tuple[Ints, Ints]:
        """Order of the squares and how many there are in every window."""
        if not self.has_windows:
            return np.arange(rows * columns), np.array([rows * columns])
        return window_order(rows, columns, self.window)

    @property
    def has_windows(self) -> bool:
        """Whether there are any."""
        return self.pattern > 0

    def sees_all(self, layer: int) -> bool:
        """Whether patches see the whole picture."""
        return not self.pattern or (layer + 1) % self.pattern == 0

    def order(self, rows: int, columns: int) -> Ints:
        squares, _ = self.windows(rows // self.merge, columns // self.merge)
        return square_order(rows, columns, self.merge).reshape(-1, self.merge**2)[squares].reshape(-1)

    def build(self, b: PictureGraph) -> Value:
        squares, lengths = self.windows(b.rows // self.merge, b.columns // self.merge)
        windows = ranges_of(lengths * self.merge**2)

        def ranges(layer: int) -> NDArray | None:
            return None if self.sees_all(layer) else windows

        x = b.graph.mul_mat(self.filters, b.patches, self.bias)
        x = self.tower.layers(b, x, rotate=self.rotation(b), ranges=ranges)
        x = self.projected(b, self.up, self.down, self.joined(self.behind(b, x)))
        return b.graph.get_rows(x, b.indices(np.argsort(squares)))

    def behind(self, b: PictureGraph, x: Value) -> Value:
        """What becomes of patches before they are joined."""
        return x


class Qwen25OmniProjector(Qwen25VLProjector):
    """The pictures of Qwen2.5-Omni (arXiv:2503.20215), whose vocabulary has other words for the ends of them; llama.cpp
    puts those of Qwen2.5-VL there.
    """

    def load_rest(self, source: Source) -> None:
        super().load_rest(source)
        if source.has_token(OMNI_WORDS[0]):
            self.begin, self.end = OMNI_WORDS


class Exaone45Projector(Qwen25VLProjector):
    """EXAONE 4.5: as Qwen2.5-VL, with fewer heads of keys and values; the file says how large pictures are."""

    begin = "<vision>"
    end = "</vision>"

    def load_tower(self, source: Source) -> GroupedTransformer:
        n_kv = size(source.keys, "attention.head_count_kv", most=self.params.n_head)
        return GroupedTransformer(source.weights, self.params, n_kv)

    def read_limits(self, source: Source) -> Limits:
        return self.file_limits(source)

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return None
