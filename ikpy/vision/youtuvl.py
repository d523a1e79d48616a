"""Youtu-VL (arXiv:2601.19798): SigLIP 2 with the windows and the rotation of Qwen2.5-VL."""

from __future__ import annotations

import math

import numpy as np

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Limits
from ikpy.vision.images import Pixels
from ikpy.vision.native_size import NativeSizeProjector
from ikpy.vision.params import MAX_IMAGE_SIZE, integers, size
from ikpy.vision.projector import Source
from ikpy.vision.qwen2vl import Qwen25VLProjector
from ikpy.vision.resize import Size, stretched
from ikpy.vision.weights import ProjectorWeights, value_of

F32 = np.float32
STEP = F32(0.02)
"""Of the scale of a picture that is too large."""
NORM_EPS = 1e-6


class YoutuVLProjector(Qwen25VLProjector):
    """LayerNorm and networks of two matrices; the file names the layers in which patches see the whole picture."""

    rms = False
    default_tokens = (1, 62500)

    def load_rest(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters = self.read_filters(weights)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.norm = weights.table("mm.input_norm.weight", (n,))
        self.up = weights.linear("mm.0", n * self.merge**2)
        self.down = weights.linear("mm.2", self.up.n_out)
        self.whole = frozenset(integers(source.keys, "wa_layer_indexes"))
        self.window = max(size(source.keys, "window_size", most=MAX_IMAGE_SIZE) // self.square, 1)

    def read_filters(self, weights: ProjectorWeights) -> Value:
        """Filters [3 p p, D], in files with the colours inside."""
        p, n, name = self.params.patch_size, self.params.n_embd, "v.patch_embd.weight"
        filters = weights.array(name, (3 * p * p, n)).reshape(n, p, p, 3)
        return value_of(filters.transpose(0, 3, 1, 2).reshape(n, -1), name)

    @property
    def has_windows(self) -> bool:
        return bool(self.whole)

    def sees_all(self, layer: int) -> bool:
        return not self.whole or layer in self.whole

    def behind(self, b: PictureGraph, x: Value) -> Value:
        return b.graph.rms_norm(x, self.norm, NORM_EPS)

    def read_limits(self, source: Source) -> Limits:
        return NativeSizeProjector.read_limits(self, source)

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return None

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        return [stretched(image, scaled_size(image.shape[:2], self.square, self.limits.most), "bilinear")]


def scaled_size(found: Size, side: int, most: int) -> Size:
    """Whole squares of a side that hold a picture, which is made smaller step by step to at most so many pixels."""
    scale = F32(1)
    while True:
        height, width = (max(math.ceil(F32(n) * scale / F32(side)), 1) * side for n in found)
        if height * width <= most or scale <= 0:
            return height, width
        scale = F32(scale - STEP)
