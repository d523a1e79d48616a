"""Gemma 4: positions by row and column, rotated halves of heads, means of squares of patches, one matrix."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.ir import Value
from ikpy.vision.axial import AxialRotation, check_head_size, places
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import fitting_size, near_square
from ikpy.vision.images import Pixels
from ikpy.vision.params import size
from ikpy.vision.patches import cut, normalized
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import padded
from ikpy.vision.weights import Linear, ProjectorWeights

ROPE_BASE = 100.0
NORM_EPS = 1e-5
"""Of the norms of large patches; the file has that of the last one."""
TOKENS = 70, 1120
"""Rows of a picture at least and at most, where the user says nothing else."""


class Gemma4Transformer(VisionTransformer):
    """Norms are RMSNorm; value heads are normed without weights; scores are not scaled."""

    @property
    def score_scale(self) -> float:
        return 1.0

    def values(self, b: PictureGraph, v: Value) -> Value:
        return b.graph.rms_norm(v, None, self.params.eps)


class Gemma4Pictures(Projector):
    """Pictures keep their proportions and have tables of positions by column and by row; their rows see each other."""

    begin = "<|image>"
    end = "<image|>"
    both_ways = True

    def load(self, source: Source) -> None:
        self.factor = size(source.keys, "projector.scale_factor", default=3)
        self.step = self.params.patch_size * self.factor
        self.limits = source.limits(TOKENS, self.step)
        self.limits.check(self.step, self.path)
        self.positions = source.weights.array("v.position_embd.weight")
        if self.positions.ndim != 3 or self.positions.shape[::2] != (2, self.params.n_embd):
            raise FileFormatError(
                f"{self.path}: tensor 'v.position_embd.weight' holds no two tables of {self.params.n_embd}"
            )
        if self.positions.shape[1] < self.step // self.side:
            raise FileFormatError(
                f"{self.path}: tensor 'v.position_embd.weight' holds {self.positions.shape[1]} positions, fewer than "
                f"the {self.step // self.side} of a token's side"
            )
        self.load_rest(source.weights)

    @abstractmethod
    def load_rest(self, weights: ProjectorWeights) -> None:
        """Takes all but the positions."""

    @property
    def side(self) -> int:
        """Pixels of a side of what has a position."""
        return self.params.patch_size

    @property
    def largest(self) -> tuple[int, int]:
        side = self.step // self.side
        n = min(self.limits.most // self.step**2, (self.positions.shape[1] // side) ** 2)
        rows, columns = near_square(n, side)
        return rows, min(columns, self.positions.shape[1] // side * side)

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        height, width = image.shape[:2]
        target = fitting_size(height, width, self.step, self.limits)
        if max(target) // self.side > self.positions.shape[1]:
            raise UsageError(f"a picture of {width} x {height} pixels is too narrow for the model")
        return [padded(image, target, "bicubic")]

    def with_positions(self, b: PictureGraph, x: Value) -> Value:
        """x [D, n] plus the positions of patches by column and by row."""
        down, across = places(b.rows, b.columns)
        return b.graph.add(x, b.floats(self.positions[0][across] + self.positions[1][down]))


class Gemma4Projector(Gemma4Pictures):
    """An encoder, and means of squares of patches."""

    def load_rest(self, weights: ProjectorWeights) -> None:
        n = self.params.n_embd
        check_head_size(self.params.head_size, self.path)
        self.filters = weights.filters("v.patch_embd.weight", self.params.patch_size, n)
        self.tower = Gemma4Transformer(weights, self.params, rms=True)
        self.spread = [weights.vector(f"v.std_{name}", n) for name in ("bias", "scale")]
        self.projection = weights.linear("mm.input_projection", n)

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    def patches(self, image: Pixels) -> tuple[NDArray[np.float32], int, int]:
        patches, rows, columns = super().patches(image)
        with np.errstate(over="ignore"):  # as in `normalized`
            return patches * np.float32(2) - np.float32(1), rows, columns

    def build(self, b: PictureGraph) -> Value:
        g, params = b.graph, self.params
        x = self.with_positions(b, g.mul_mat(self.filters, b.patches))
        down, across = places(b.rows, b.columns)
        rotation = AxialRotation(b, params.head_size, across, down, ROPE_BASE)
        x = self.tower.layers(b, x, rotate=lambda b, heads: rotation(b, heads, neox=True))
        x = g.scale(b.mean_pooled(x, self.factor), float(np.sqrt(np.float32(params.n_embd))))
        bias, scale = self.spread
        if bias is not None and scale is not None:
            x = g.mul(g.add(x, g.scale(bias, -1.0)), scale)
        return b.linear(self.projection, g.rms_norm(x, None, params.eps))


class Gemma4UnifiedProjector(Gemma4Pictures):
    """Gemma 4 without an encoder: large patches, normed before and behind their matrix and with their positions."""

    def load_rest(self, weights: ProjectorWeights) -> None:
        n = self.params.n_embd
        name = "v.patch_embd.weight"
        self.embedding = Linear(weights.filters(name, self.step, n), weights.vector("v.patch_embd.bias", n))
        sizes = (self.n_patch_elements, n, n)
        self.norms = [weights.norm(f"v.patch_norm.{i + 1}", size) for i, size in enumerate(sizes)]
        self.projection = weights.linear("mm.input_projection", n)

    @property
    def side(self) -> int:
        return self.step

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    @property
    def n_patch_elements(self) -> int:
        return 3 * self.step**2

    def patches(self, image: Pixels) -> tuple[NDArray[np.float32], int, int]:
        rows, columns = image.shape[0] // self.step, image.shape[1] // self.step
        return cut(normalized(image, self.params), self.step), rows, columns

    def build(self, b: PictureGraph) -> Value:
        x = b.linear(self.embedding, b.layer_norm(self.norms[0], b.patches, NORM_EPS))
        x = self.with_positions(b, b.layer_norm(self.norms[1], x, NORM_EPS))
        x = b.layer_norm(self.norms[2], x, NORM_EPS)
        return b.linear(self.projection, b.graph.rms_norm(x, None, self.params.eps))
