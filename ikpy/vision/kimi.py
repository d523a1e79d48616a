"""Kimi-VL (arXiv:2504.07491), Kimi K2.5 and GLM-5.2 Vision: MoonViT."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Ints, Limits, axial_table, resampled
from ikpy.vision.native_size import MAX_PIXELS, ROPE_BASE, NativeSizeProjector
from ikpy.vision.params import size
from ikpy.vision.projector import Source
from ikpy.vision.weights import ProjectorWeights

GLM_WORDS = "<|begin_of_image|>", "<|end_of_image|>"


class KimiVLProjector(NativeSizeProjector):
    """Learned positions that are stretched over the picture, and rotation by column and row.

    Positions are interpolated by cubics, as the published code does; llama.cpp does it linearly.
    """

    begin = "<|media_start|>"
    end = "<|media_end|>"
    default_tokens = (8, 1024)
    merge_key = "projector.scale_factor"
    neighbours = True

    def load_rest(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters = weights.filters("v.patch_embd.weight", self.params.patch_size, n)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.positions = self.read_positions(weights)
        self.norm = weights.norm("mm.input_norm", n)
        self.up = weights.linear("mm.1", n * self.merge**2)
        self.down = weights.linear("mm.2", self.up.n_out)

    def read_positions(self, weights: ProjectorWeights) -> NDArray[np.float32]:
        """The table [side, side, D]."""
        return self.square_table(weights, "v.position_embd.weight")

    @property
    def n_out(self) -> int:
        return self.down.n_out

    @property
    def projector_eps(self) -> float:
        """Epsilon of the norm before the projector."""
        return 1e-5

    def rotation_table(self, place: Ints, columns: int) -> NDArray[np.float32]:
        rates = ROPE_BASE**-self.steps
        return axial_table((place % columns, place // columns), (rates, rates))

    def build(self, b: PictureGraph) -> Value:
        positions = resampled(self.positions, b.rows, b.columns, "bicubic")[self.order(b.rows, b.columns)]
        x = b.graph.add(b.graph.mul_mat(self.filters, b.patches, self.bias), b.floats(positions))
        x = b.layer_norm(self.norm, self.tower.layers(b, x, rotate=self.rotation(b)), self.projector_eps)
        return self.projected(b, self.up, self.down, self.joined(x))


class KimiK25Projector(KimiVLProjector):
    """As Kimi-VL; the table of positions has three dimensions. GLM-5.2 Vision has it too, with words of its own."""

    begin = "<|media_begin|>"
    default_tokens = (2, 4096)

    def load_rest(self, source: Source) -> None:
        super().load_rest(source)
        if source.has_token(GLM_WORDS[0]):
            self.begin, self.end = GLM_WORDS

    def read_positions(self, weights: ProjectorWeights) -> NDArray[np.float32]:
        name, n = "v.position_embd.weight", self.params.n_embd
        shape = (*weights.shape(name), 1, 1)
        return weights.array(name, (n, shape[1], shape[2])).reshape(shape[2], shape[1], n)

    def read_limits(self, source: Source) -> Limits:
        """What the file says, if it says both, counts before what the user says."""
        found = (
            size(source.keys, f"image_{end}_pixels", default=0, least=0, most=MAX_PIXELS) for end in ("min", "max")
        )
        limits = Limits(*found)
        return limits if limits.least and limits.most else super().read_limits(source)

    @property
    def projector_eps(self) -> float:
        return self.params.eps
