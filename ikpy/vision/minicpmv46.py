"""MiniCPM-V 4.6: squares of patches become one behind some of the layers, and again behind the last one."""

from __future__ import annotations

import numpy as np

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.blocks import split_heads
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.images import Pixels
from ikpy.vision.minicpmv import MiniCPMVPictures, like_a_square
from ikpy.vision.params import VisionParams, integers, size
from ikpy.vision.projector import Source
from ikpy.vision.resize import stretched
from ikpy.vision.weights import ProjectorWeights

PAIR = 2
"""Patches of a side that become one."""
FACTORS = (2, 4)


class MiniCPMV46Projector(MiniCPMVPictures):
    """With a factor of 2 they become one behind the last layer alone."""

    def load_rest(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.factor = size(source.keys, "projector.scale_factor", default=4)
        if self.factor not in FACTORS:
            raise UnsupportedError(f"{self.path}: clip.vision.projector.scale_factor {self.factor}; 2 and 4 are known")
        self.merger = None
        if self.factor == PAIR * PAIR:
            indexes = integers(source.keys, "wa_layer_indexes")
            if not indexes or not 0 <= indexes[0] < self.params.n_layer:
                raise FileFormatError(f"{self.path}: clip.vision.wa_layer_indexes names none of the layers")
            self.insert, self.merger = indexes[0], InnerMerger(weights, self.params)
        self.norm = weights.norm("mm.input_norm", n * PAIR**2)
        self.up = weights.linear("mm.up", n * PAIR**2)
        self.down = weights.linear("mm.down", self.up.n_out)

    @property
    def n_out(self) -> int:
        return self.down.n_out

    def whole(self, image: Pixels) -> Pixels | None:
        side, (height, width) = self.params.image_size, image.shape[:2]
        if self.factor == PAIR and height * width <= side * side:
            return stretched(image, like_a_square((height, width), side, self.step, enlarge=True), "bicubic")
        return super().whole(image)

    def build(self, b: PictureGraph) -> Value:
        x, rows, columns = self.embedded(b), b.rows, b.columns
        for il, block in enumerate(self.tower.blocks):
            x = self.tower.layer(b, block, x, None, None)
            if self.merger is not None and il == self.insert:
                x, rows, columns = self.merger.build(b, x), rows // PAIR, columns // PAIR
        if self.tower.post_norm is not None:
            x = self.tower.norm(b, self.tower.post_norm, x)
        x = b.layer_norm(self.norm, b.merged(x, PAIR, rows=rows, columns=columns), self.params.eps)
        return b.linear(self.down, b.activated(b.linear(self.up, x), "gelu_erf"))


class InnerMerger:
    """The patches of a square attend to each other; a network on all of them is added to their mean."""

    def __init__(self, weights: ProjectorWeights, params: VisionParams) -> None:
        self.params = params
        n, prefix = params.n_embd, "v.vit_merger"
        self.norm = weights.norm(f"{prefix}.ln1", n)
        self.q, self.k, self.v, self.out = (
            weights.linear(f"{prefix}.attn_{part}", n, n) for part in ("q", "k", "v", "out")
        )
        self.square_norm = weights.norm(f"{prefix}.ds_ln", n * PAIR**2)
        self.up = weights.linear(f"{prefix}.ds_ffn_up", n * PAIR**2)
        self.down = weights.linear(f"{prefix}.ds_ffn_down", self.up.n_out, n)

    def build(self, b: PictureGraph, x: Value) -> Value:
        """f32 [D, n / 4] of all patches [D, n]."""
        g, eps, (n, n_patches) = b.graph, self.params.eps, x.shape[:2]
        x = b.merged(x, PAIR).reshape(n, n_patches)  # square by square
        h = b.layer_norm(self.norm, x, eps)
        q, k, v = (split_heads(b.linear(part, h), self.params.head_size) for part in (self.q, self.k, self.v))
        first = np.arange(n_patches) // PAIR**2 * PAIR**2
        ranges = np.stack([first, first + PAIR**2], axis=1)
        x = g.add(x, b.linear(self.out, b.attention(q, k, v, scale=self.params.head_size**-0.5, ranges=ranges)))
        squares = x.reshape(n * PAIR**2, n_patches // PAIR**2)
        total = squares.slice0(0, n)
        for i in range(1, PAIR**2):
            total = g.add(total, squares.slice0(i * n, n))
        hidden = b.activated(b.linear(self.up, b.layer_norm(self.square_norm, squares, eps)), "gelu")
        return g.add(b.linear(self.down, hidden), g.scale(total, 1 / PAIR**2))
