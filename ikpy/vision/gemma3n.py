"""Gemma 3n: MobileNet-V5, whose last two stages are fused, norms and one matrix."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.images import Pixels
from ikpy.vision.mobilenet import ACTIVATION, EPS, Grid, Pointwise, normed, stage
from ikpy.vision.patches import normalized
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import padded
from ikpy.vision.weights import ProjectorWeights, value_of

STAGES = 4
SIDE = 16
"""Rows and columns of the result."""
CELL, SEEN = 4, 5
"""Pixels of a side of a cell, in which the first filters give 2 x 2 states, and of what they read for it."""


class Gemma3nProjector(Projector):
    """Pictures are brought to the size of the encoder."""

    begin = "<start_of_image>"
    end = "<end_of_image>"

    def load(self, source: Source) -> None:
        weights, side = source.weights, self.params.image_size
        if side % (SIDE * SIDE):
            raise FileFormatError(f"{self.path}: clip.vision.image_size {side} is no multiple of {SIDE * SIDE}")
        self.params = replace(self.params, patch_size=CELL)
        self.first = FirstFilters(weights)
        n, sizes = self.first.n_out, []
        self.stages = []
        for number in range(STAGES):
            self.stages.append(stage(weights, number, n))
            n = self.stages[-1][-1].n_out
            sizes.append(n)
        self.expand = Pointwise(weights, "v.msfa.ffn.pw_exp.conv", "v.msfa.ffn.pw_exp.bn", sum(sizes[-2:]))
        self.project = Pointwise(weights, "v.msfa.ffn.pw_proj.conv", "v.msfa.ffn.pw_proj.bn", self.expand.n_out)
        n = self.project.n_out
        self.fused_norm = weights.table("v.msfa.norm.weight", (n,))
        self.norm = weights.table("mm.soft_emb_norm.weight", (n,))
        self.projection = weights.matrix("mm.input_projection.weight", n)

    @property
    def n_out(self) -> int:
        return self.projection.shape[1]

    @property
    def n_patch_elements(self) -> int:
        return 3 * SEEN**2

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side = self.params.image_size
        return [padded(image, (side, side), "bilinear")]

    def patches(self, image: Pixels) -> tuple[NDArray[np.float32], int, int]:
        """What the first filters read for every cell: channels of 5 x 5 pixels, zeros beyond the edges."""
        pixels = np.pad(normalized(image, self.params), ((0, SEEN - CELL), (0, SEEN - CELL), (0, 0)))
        cells = np.lib.stride_tricks.sliding_window_view(pixels, (SEEN, SEEN), axis=(0, 1))[::CELL, ::CELL]
        rows, columns = cells.shape[:2]
        return np.ascontiguousarray(cells).reshape(rows * columns, -1), rows, columns

    def build(self, b: PictureGraph) -> Value:
        g, x, ends = b.graph, self.first.build(b), []
        for blocks in self.stages:
            for i, block in enumerate(blocks):
                x = block.build(b, x, 1 if i else 2)
            ends.append(x)
        states = self.fused(b, *ends[-2:])
        states = g.rms_norm(g.scale(states, math.sqrt(states.shape[0])), self.norm, EPS)
        return g.rms_norm(g.mul_mat(self.projection, states), None, EPS)

    def fused(self, b: PictureGraph, fine: Grid, coarse: Grid) -> Value:
        """States [D, 16 * 16] of those of two stages; each of the second stands for those of the first around it."""
        rows, columns = fine.size
        at, across = np.ix_(range(rows), range(columns))
        nearest = at * coarse.size[0] // rows * coarse.size[1] + across * coarse.size[1] // columns
        spread = b.graph.get_rows(coarse.states, b.indices(nearest.reshape(-1)))
        x = b.activated(self.expand.build(b, b.side_by_side([fine.states, spread])), ACTIVATION)
        x = self.project.build(b, x)
        if rows != SIDE:
            x = b.mean_pooled(x, rows // SIDE, rows=rows, columns=columns)
        return normed(b, self.fused_norm, x)


class FirstFilters:
    """3 x 3 filters over every second pixel, as one matrix [75, 4 C] over cells."""

    def __init__(self, weights: ProjectorWeights) -> None:
        name = "v.conv_stem.conv"
        self.n_out = n = weights.shape(f"{name}.weight")[-1]
        filters = weights.array(f"{name}.weight", (3, 3, 3, n))
        matrix = np.zeros((2, 2, n, 3, SEEN, SEEN), np.float32)
        for i in range(2):
            for j in range(2):
                matrix[i, j, :, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3] = filters
        self.matrix = value_of(matrix.reshape(4 * n, -1), f"{name}.weight")
        self.bias = None
        if weights.has(f"{name}.bias"):
            self.bias = value_of(np.tile(weights.array(f"{name}.bias", (n,), (1, 1, n)).reshape(n), 4), f"{name}.bias")
        self.norm = weights.table("v.conv_stem.bn.weight", (n,))

    def build(self, b: PictureGraph) -> Grid:
        """States of every second row and column of pixels."""
        g, n, cells = b.graph, self.n_out, b.n_patches
        found = g.mul_mat(self.matrix, b.patches, self.bias).reshape(n, 4 * cells)
        found = b.activated(normed(b, self.norm, found), ACTIVATION)
        line = found.strides[1]
        source = found.view((2 * n, b.columns, 2, b.rows), (4 * line, 2 * line, 4 * line * b.columns))
        states = g.new(2 * n, b.columns, 2, b.rows)
        g.copy(source, states)
        return Grid(states.reshape(n, 4 * cells), (2 * b.rows, 2 * b.columns))
