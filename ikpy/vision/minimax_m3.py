"""MiniMax M3."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ikpy.graph.ir import Value
from ikpy.vision.encoder import Rotate, VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import turned
from ikpy.vision.native_size import ROPE_BASE, NativeSizeProjector
from ikpy.vision.projector import Source


class MiniMaxM3Projector(NativeSizeProjector):
    """Layers as those of CLIP, whose heads turn a third each by time, row and column; the rest stays.

    Two matrices bring patches to the size of the text model, and two more their squares.
    """

    begin = "]<]start of image[>["
    end = "]<]end of image[>["
    default_tokens = (8, 576)
    stretches = True

    def load_tower(self, source: Source) -> VisionTransformer:
        return VisionTransformer(source.weights, replace(self.params, activation="gelu_erf"))  # whatever the file says

    def load_rest(self, source: Source) -> None:
        weights = source.weights
        self.filters = self.two_frames(weights)
        self.up = weights.linear("mm.1", self.params.n_embd)
        self.down = weights.linear("mm.2", self.up.n_out)
        self.merger_up = weights.linear("mm.merger.fc1", self.down.n_out * self.merge**2)
        self.merger_down = weights.linear("mm.merger.fc2", self.merger_up.n_out)

    @property
    def n_out(self) -> int:
        return self.merger_down.n_out

    def rotation(self, b: PictureGraph) -> Rotate:
        part = self.params.head_size // 3 // 2 * 2  # elements of a head that one of the three positions turns
        rates = ROPE_BASE ** -(np.arange(part // 2) / (part // 2))
        place = self.order(b.rows, b.columns)
        rows, columns = (b.floats(turned(at, rates)) for at in (place // b.columns, place % b.columns))

        def rotate(b: PictureGraph, heads: Value) -> Value:
            heads = b.graph.rope(heads, rows, neox=True, offset=part)
            return b.graph.rope(heads, columns, neox=True, offset=2 * part)

        return rotate

    def build(self, b: PictureGraph) -> Value:
        x = self.tower.layers(b, b.graph.mul_mat(self.filters, b.patches), rotate=self.rotation(b))
        x = self.projected(b, self.up, self.down, x)
        return self.projected(b, self.merger_up, self.merger_down, self.joined(x))
