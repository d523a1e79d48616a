"""GLM-4.1V, 4.5V, 4.6V (arXiv:2507.01006), GLM-OCR and GLM-5.3 Flash."""

from __future__ import annotations

import math

import numpy as np

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.encoder import EncoderLayer, VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Limits, resampled, whole_picture_size
from ikpy.vision.images import Pixels
from ikpy.vision.native_size import NativeSizeProjector
from ikpy.vision.params import VisionParams
from ikpy.vision.projector import Source
from ikpy.vision.resize import stretched
from ikpy.vision.weights import Linear, ProjectorWeights

PROJECTOR_EPS = 1e-5
"""Epsilon of the norm in the projector; files do not say it."""


class Glm4vProjector(NativeSizeProjector):
    """RMSNorm and gated networks; squares of patches become rows by one matrix, which a gated network follows.

    Patches are normed and have learned positions that are stretched over the picture; those of GLM-OCR have neither.
    """

    begin = "<|begin_of_image|>"
    end = "<|end_of_image|>"
    rms = True

    def load_rest(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters = self.two_frames(weights)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.norm = weights.norm_if("v.norm_embd", n)
        name = "v.position_embd.weight"
        self.positions = self.square_table(weights, name) if weights.has(name) else None
        merger = self.joining_matrix(weights, "mm.patch_merger.weight")
        wide = merger.shape[1]
        self.merger = Linear(merger, weights.vector("mm.patch_merger.bias", wide))
        self.projection = weights.linear("mm.model.fc", wide, wide)
        self.projection_norm = weights.norm("mm.post_norm", wide)
        self.gate = weights.linear("mm.gate", wide)
        self.up = weights.linear("mm.up", wide, self.gate.n_out)
        self.down = weights.linear("mm.down", self.gate.n_out)

    @property
    def n_out(self) -> int:
        return self.down.n_out

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return rows // self.merge, columns // self.merge

    def build(self, b: PictureGraph) -> Value:
        g = b.graph
        x = g.mul_mat(self.filters, b.patches, self.bias)
        if self.norm is not None:
            x = self.tower.norm(b, self.norm, x)
        if self.positions is not None:
            stretched = resampled(self.positions, b.rows, b.columns, "bicubic")
            x = g.add(x, b.floats(stretched[self.order(b.rows, b.columns)]))
        x = b.linear(self.merger, self.joined(self.tower.layers(b, x, rotate=self.rotation(b))))
        x = b.layer_norm(self.projection_norm, b.linear(self.projection, x), PROJECTOR_EPS)
        x = b.activated(x, "gelu_erf")
        return b.linear(self.down, self.network(b, b.linear(self.gate, x), b.linear(self.up, x)))

    def network(self, b: PictureGraph, gate: Value, up: Value) -> Value:
        """act(gate) * up."""
        return b.graph.mul(b.activated(gate, self.params.activation), up)


class Glm5vProjector(Glm4vProjector):
    """GLM-5.3 Flash: as GLM-OCR, factors of gated networks being bounded.

    Pictures within the limits stay as they are, in the upper left corner of whole squares.
    """

    def read_limits(self, source: Source) -> Limits:
        """What the user says counts before what the file says."""
        found, area = self.file_limits(source), self.square**2
        least = source.min_tokens * area if source.min_tokens else found.least
        return Limits(least, source.max_tokens * area if source.max_tokens else found.most)

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        height, width = image.shape[:2]
        target = whole_picture_size(height, width, self.square, self.limits)
        scale = min(target[0] / height, target[1] / width)
        if height * width >= self.limits.least:
            scale = min(scale, 1.0)
        inner = max(1, min(int(height * scale), target[0])), max(1, min(int(width * scale), target[1]))
        found = np.zeros((*target, 3), np.uint8)
        found[: inner[0], : inner[1]] = stretched(image, inner, "bicubic")
        return [found]

    def load_tower(self, source: Source) -> VisionTransformer:
        self.limit = source.keys.f32("vision.swiglu_clamp")
        if not 0 < self.limit < math.inf:
            raise FileFormatError(f"{self.path}: clip.vision.swiglu_clamp is {self.limit}, not above 0")
        return BoundedTransformer(source.weights, self.params, self.limit)

    def network(self, b: PictureGraph, gate: Value, up: Value) -> Value:
        return b.graph.gated(gate, up, "silu", self.limit)

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return None


class BoundedTransformer(VisionTransformer):
    """RMSNorm and gated networks whose factors are bounded."""

    def __init__(self, weights: ProjectorWeights, params: VisionParams, limit: float) -> None:
        super().__init__(weights, params, rms=True)
        self._limit = limit

    def feed_forward(self, b: PictureGraph, layer: EncoderLayer, x: Value) -> Value:
        if layer.gate is None:
            return super().feed_forward(b, layer, x)
        gate, up = b.linear(layer.gate, x), b.linear(layer.up, x)
        return b.linear(layer.down, b.graph.gated(gate, up, "silu", self._limit))
