"""LFM2-VL: SigLIP 2 with positions stretched to the picture, squares of patches side by side, two matrices; tiles."""

from __future__ import annotations

import numpy as np

from ikpy.graph.ir import Value
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import fitting_size, near_square
from ikpy.vision.images import Pixels
from ikpy.vision.params import resize_method, size
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import padded, stretched
from ikpy.vision.stretched_positions import StretchedEmbedding
from ikpy.vision.tiling import closest_grid, rows_of_tiles

NORM_EPS = 1e-5
TOKENS = 64, 256
"""Rows of a picture in one at least and at most, where the user says nothing else."""
TILE = 512
GRID_TILES = 2, 10
TOLERANCE = 2.0
"""Pictures with more pixels than that many times the most are cut into tiles."""


class Lfm2Projector(Projector):
    """Large pictures come as tiles, then all of it in one."""

    begin = "<|image_start|>"
    end = "<|image_end|>"

    def load(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.factor = size(source.keys, "projector.scale_factor")
        self.step = self.params.patch_size * self.factor
        self.limits = source.limits(TOKENS, self.step)
        self.limits.check(self.step, self.path)
        self.method = resize_method(source.keys, "bilinear")
        self.embedding = StretchedEmbedding(weights, self.params)
        self.tower = VisionTransformer(weights, self.params)
        self.norm = weights.norm_if("mm.input_norm", n * self.factor**2)
        self.mlp = weights.mlp("mm.1", "mm.2", n * self.factor**2)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    @property
    def largest(self) -> tuple[int, int]:
        return near_square(max(self.limits.most, TILE**2) // self.step**2, self.factor)

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        height, width = image.shape[:2]
        whole = stretched(image, fitting_size(height, width, self.step, self.limits), self.method)
        if not self.needs_tiles(image):
            return [whole]
        rows, columns = closest_grid(image.shape[:2], TILE, *GRID_TILES)
        refined = padded(image, (rows * TILE, columns * TILE), self.method)
        pieces: list[str | Pixels] = []
        for y, line in enumerate(rows_of_tiles(refined, (TILE, TILE))):
            for x, tile in enumerate(line):
                pieces += [f"<|img_row_{y + 1}_col_{x + 1}|>", tile]
        return [*pieces, "<|img_thumbnail|>", whole]

    def needs_tiles(self, image: Pixels) -> bool:
        """Whether the picture has too many pixels for one."""
        height, width = (max(self.params.patch_size, int(np.rint(n / self.step)) * self.step) for n in image.shape[:2])
        return height * width > self.limits.most * TOLERANCE

    def build(self, b: PictureGraph) -> Value:
        x = b.merged(self.tower.layers(b, self.embedding.build(b)), self.factor)
        if self.norm is not None:
            x = b.layer_norm(self.norm, x, NORM_EPS)
        return b.mlp(self.mlp, x, "gelu_erf")
