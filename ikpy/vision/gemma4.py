"""Gemma 4: positions by row and column, rotated halves of heads, means of squares of patches, one matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.ir import Value
from ikpy.vision.axial import AxialRotation, places
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Limits, fitting_size
from ikpy.vision.images import Pixels
from ikpy.vision.params import size
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import padded

ROPE_BASE = 100.0
TOKENS = 70, 1120
"""Rows of a picture at least and at most, where the user says nothing else."""


class Gemma4Transformer(VisionTransformer):
    """Norms are RMSNorm; value heads are normed without weights; scores are not scaled."""

    @property
    def score_scale(self) -> float:
        return 1.0

    def values(self, b: PictureGraph, v: Value) -> Value:
        return b.graph.rms_norm(v, None, self.params.eps)


class Gemma4Projector(Projector):
    """Pictures keep their proportions; their rows see each other."""

    begin = "<|image>"
    end = "<image|>"
    both_ways = True

    def load(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.factor = size(source.keys, "projector.scale_factor", default=3)
        area = (self.params.patch_size * self.factor) ** 2
        least, most = source.min_tokens or TOKENS[0], source.max_tokens or TOKENS[1]
        if least > most:
            raise UsageError(
                f"at least {least} and at most {most} rows of a picture: give both --image-min-tokens and -max"
            )
        self.limits = Limits(least * area, most * area)
        if self.params.head_size % 4:
            raise FileFormatError(
                f"{source.keys.gguf.path}: heads of {self.params.head_size} elements have no halves to rotate"
            )
        self.filters = weights.filters("v.patch_embd.weight", self.params.patch_size, n)
        self.positions = weights.array("v.position_embd.weight", weights.shape("v.position_embd.weight"))
        if self.positions.ndim != 3 or self.positions.shape[::2] != (2, n):
            raise FileFormatError(
                f"{source.keys.gguf.path}: tensor 'v.position_embd.weight' holds no two tables of {n}"
            )
        self.tower = Gemma4Transformer(weights, self.params, rms=True)
        self.spread = [weights.vector(f"v.std_{name}", n) for name in ("bias", "scale")]
        self.projection = weights.linear("mm.input_projection", n)

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        height, width = image.shape[:2]
        step = self.params.patch_size * self.factor
        target = fitting_size(height, width, step, self.limits)
        if max(target) // self.params.patch_size > self.positions.shape[1]:
            raise UsageError(f"a picture of {width} x {height} pixels is too narrow for the model")
        return [padded(image, target, "bicubic")]

    def patches(self, image: Pixels) -> tuple[NDArray[np.float32], int, int]:
        patches, rows, columns = super().patches(image)
        return patches * np.float32(2) - np.float32(1), rows, columns

    def build(self, b: PictureGraph) -> Value:
        g, params = b.graph, self.params
        down, across = places(b.rows, b.columns)
        x = g.add(g.mul_mat(self.filters, b.patches), b.floats(self.positions[0][across] + self.positions[1][down]))
        rotation = AxialRotation(b, params.head_size, across, down, ROPE_BASE)
        x = self.tower.layers(b, x, rotate=lambda b, heads: rotation(b, heads, neox=True))
        x = g.scale(b.mean_pooled(x, self.factor), float(np.sqrt(np.float32(params.n_embd))))
        bias, scale = self.spread
        if bias is not None and scale is not None:
            x = g.mul(g.add(x, g.scale(bias, -1.0)), scale)
        return b.linear(self.projection, g.rms_norm(x, None, params.eps))
