"""Projectors whose pictures keep their proportions, cut into as many patches as they need."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.ir import Value
from ikpy.vision.axial import check_head_size
from ikpy.vision.encoder import Rotate, VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Ints, Limits, axial_table, fitting_size, near_square, square_order
from ikpy.vision.images import Pixels
from ikpy.vision.params import size
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import Size, padded, stretched
from ikpy.vision.weights import Linear, ProjectorWeights, value_of

MAX_MERGE = 64
MAX_PIXELS = 2**31 - 1
MAX_TOKENS = 1 << 14
"""Rows of a picture where narrow ones exceed the limits: no side is less than one square."""
ROPE_BASE = 10000.0


class NativeSizeProjector(Projector):
    """Pictures become whole squares of merge x merge patches, each of them one row of the text.

    default_tokens: rows of a picture at least and at most, where neither file nor user say otherwise. merge_key,
    default_merge: where files say how many patches a square has. neighbours: rotated pairs are neighbouring elements of
    a head, not those half a head apart. rms: norms are RMSNorm. stretches: pictures are, instead of having bars.
    longest_edge: to which pictures are brought.
    """

    default_tokens: ClassVar[tuple[int, int]] = (8, 4096)
    merge_key: ClassVar[str] = "spatial_merge_size"
    default_merge: ClassVar[int] = 2
    neighbours: ClassVar[bool] = False
    rms: ClassVar[bool] = False
    stretches: ClassVar[bool] = False
    longest_edge: int | None = None

    def load(self, source: Source) -> None:
        self.path = source.keys.gguf.path
        self.merge = size(source.keys, self.merge_key, default=self.default_merge, most=MAX_MERGE)
        self.limits = self.read_limits(source)
        self.limits.check(self.square, self.path)
        self.tower = self.load_tower(source)
        check_head_size(self.tower.head_size, self.path)
        self.load_rest(source)

    def load_tower(self, source: Source) -> VisionTransformer:
        """Takes the layers."""
        return VisionTransformer(source.weights, self.params, rms=self.rms)

    @abstractmethod
    def load_rest(self, source: Source) -> None:
        """Takes what is not part of the layers."""

    @property
    def square(self) -> int:
        """Pixels of a side of what becomes one row."""
        return self.params.patch_size * self.merge

    # tensors that several families have

    def two_frames(self, weights: ProjectorWeights) -> Value:
        """Filters [3 p p, D] for pictures, which some encoders see as films of two equal frames: sums of both."""
        names, n, patch = ("v.patch_embd.weight", "v.patch_embd.weight.1"), self.params.n_embd, self.params.patch_size
        first, second = (weights.array(name, (patch, patch, 3, n)) for name in names)
        return value_of((first + second).reshape(n, -1), names[0])

    def square_table(self, weights: ProjectorWeights, name: str) -> NDArray[np.float32]:
        """Positions of a square grid [side, side, D]."""
        count = weights.shape(name)[-1]
        side = math.isqrt(count)
        if side * side != count:
            raise FileFormatError(f"{self.path}: the {count} positions of {name} are no square")
        return weights.array(name, (self.params.n_embd, count)).reshape(side, side, self.params.n_embd)

    def joining_matrix(self, weights: ProjectorWeights, name: str) -> Value:
        """A matrix over the patches of a square, [m² D, n]. Files have the patches inside of the elements."""
        n, m, shape = self.params.n_embd, self.merge, weights.shape(name)
        joined = weights.array(name, (n * m * m, shape[-1]), (m, m, n, shape[-1])).reshape(shape[-1], n, m * m)
        return value_of(joined.transpose(0, 2, 1).reshape(shape[-1], -1), name)

    # sizes of pictures

    def read_limits(self, source: Source) -> Limits:
        """Pixels of a picture: as the user says or as usual."""
        return source.limits(self.default_tokens, self.square)

    def limits_of_all(self, source: Source) -> Limits:
        """What the user says counts before what the file says, and that before what is usual."""
        usual = source.limits(self.default_tokens, self.square)
        least = size(source.keys, "image_min_pixels", default=usual.least, most=MAX_PIXELS)
        most = size(source.keys, "image_max_pixels", default=usual.most, most=MAX_PIXELS)
        return Limits(usual.least if source.min_tokens else least, usual.most if source.max_tokens else most)

    def file_limits(self, source: Source) -> Limits:
        """Pixels of a picture as the file says, which must be there."""
        names = "image_min_pixels", "image_max_pixels"
        return Limits(*(size(source.keys, name, most=MAX_PIXELS) for name in names))

    def fitted(self, image: Pixels) -> Size:
        """The size that a picture is brought to."""
        height, width = image.shape[:2]
        target = fitting_size(height, width, self.square, self.limits, self.longest_edge)
        tokens = target[0] * target[1] // self.square**2
        if tokens > max(MAX_TOKENS, self.limits.most // self.square**2):
            raise UsageError(f"the picture of {width} x {height} pixels is too narrow: it would have {tokens} tokens")
        return target

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        target = self.fitted(image)
        return [stretched(image, target, "bicubic") if self.stretches else padded(image, target, "bicubic")]

    @property
    def largest(self) -> tuple[int, int]:
        """Of `longest_edge`, if there is one, or of the pixels that pictures have at most."""
        n = self.limits.most // self.square**2
        if self.longest_edge is not None:
            n = min(n, math.ceil(self.longest_edge / self.square) ** 2)
        return near_square(n, self.merge)

    # order and positions of patches

    def order(self, rows: int, columns: int) -> Ints:
        """Which patches, counted line by line, the encoder sees one after the other: those of a square together."""
        return square_order(rows, columns, self.merge)

    def patches(self, image: Pixels) -> tuple[NDArray[np.float32], int, int]:
        patches, rows, columns = super().patches(image)
        return patches[self.order(rows, columns)], rows, columns

    def rotation_table(self, place: Ints, columns: int) -> NDArray[np.float32]:
        """Table of `Graph.rope` for patches at these places, counted line by line: half of the pairs turn by the row,
        half by the column, each with the rates of a head of half the size."""
        rates = ROPE_BASE**-self.steps
        return axial_table((place // columns, place % columns), (rates, rates))

    @property
    def steps(self) -> NDArray[np.float64]:
        """Exponents of the rates of half of the pairs of a head."""
        n = self.tower.head_size // 4
        return np.arange(n) / n

    # graph

    def rotation(self, b: PictureGraph) -> Rotate:
        """Rotates queries and keys by the places of the patches."""
        return self.turning(b, self.order(b.rows, b.columns))

    def turning(self, b: PictureGraph, place: Ints) -> Rotate:
        """Rotates by these places line by line."""
        table = b.floats(self.rotation_table(place, b.columns))
        return lambda b, heads: b.graph.rope(heads, table, neox=not self.neighbours)

    def joined(self, x: Value) -> Value:
        """Patches [D, T] of every square as one row [m² D, T / m²]."""
        m = self.merge**2
        return x.reshape(x.shape[0] * m, x.shape[1] // m)

    @staticmethod
    def projected(b: PictureGraph, up: Linear, down: Linear, x: Value) -> Value:
        """down(gelu(up x)); GELU is that of the published models, not its approximation."""
        return b.linear(down, b.activated(b.linear(up, x), "gelu_erf"))
