"""Pixtral (arXiv:2410.07073) and Mistral Small 3.1 and 3.2, Medium, Large 3, Ministral 3."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Ints, axial_table
from ikpy.vision.images import Pixels
from ikpy.vision.native_size import MAX_TOKENS, ROPE_BASE, NativeSizeProjector
from ikpy.vision.params import MAX_IMAGE_SIZE, size
from ikpy.vision.projector import Source
from ikpy.vision.rows import MediaRows


class PixtralProjector(NativeSizeProjector):
    """RMSNorm and gated networks; the rows of a picture are lines of text with a row of [IMG_BREAK] between them.

    Rates of rotation are dealt out in turn: rows get the first, third ..., columns the second, fourth ... Later models
    join squares of patches by one matrix.
    """

    end = "[IMG_END]"
    default_tokens = (8, 1024)
    default_merge = 1
    neighbours = True
    rms = True

    def load_rest(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters = weights.filters("v.patch_embd.weight", self.params.patch_size, n)
        self.norm = self.merger = None
        if weights.has("mm.patch_merger.weight"):
            self.norm = weights.norm("mm.input_norm", n)
            self.merger = self.joining_matrix(weights, "mm.patch_merger.weight")
        self.up = weights.linear("mm.1", n if self.merger is None else self.merger.shape[1])
        self.down = weights.linear("mm.2", self.up.n_out)
        self.line_end: NDArray[np.float32] | None = None
        if weights.has("v.token_embd.img_break"):
            self.line_end = weights.array("v.token_embd.img_break", (self.down.n_out,))

    @property
    def n_out(self) -> int:
        return self.down.n_out

    def rotation_table(self, place: Ints, columns: int) -> NDArray[np.float32]:
        rates = ROPE_BASE**-self.steps, ROPE_BASE ** -(self.steps + 2 / self.params.head_size)
        return axial_table((place // columns, place % columns), rates)

    def rows(self, image: Pixels) -> MediaRows:
        rows = super().rows(image)
        if self.line_end is None:
            return rows
        lines = rows.values.reshape(image.shape[0] // self.square, -1, self.n_out)
        ends = np.broadcast_to(self.line_end, (len(lines), 1, self.n_out))
        return MediaRows(np.concatenate([lines, ends], axis=1).reshape(-1, self.n_out)[:-1])

    def build(self, b: PictureGraph) -> Value:
        x = self.tower.layers(b, b.graph.mul_mat(self.filters, b.patches), rotate=self.rotation(b))
        if self.norm is not None and self.merger is not None:
            x = b.graph.rms_norm(x, self.norm.weight, self.params.eps)
            x = b.graph.mul_mat(self.merger, self.joined(x))
        return self.projected(b, self.up, self.down, x)


class LightOnOcrProjector(PixtralProjector):
    """As Mistral 3, without rows between lines; pictures are brought to one length of their longer side."""

    begin = "<|im_start|>"
    end = "<|im_end|>"
    default_tokens = (0, MAX_TOKENS)

    def load_rest(self, source: Source) -> None:
        super().load_rest(source)
        self.line_end = None
        self.longest_edge = size(source.keys, "preproc_image_size", default=self.params.image_size, most=MAX_IMAGE_SIZE)
