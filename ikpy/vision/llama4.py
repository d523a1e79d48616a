"""Llama 4: a class token, learned and rotated positions, squares of patches side by side, four matrices; tiles."""

from __future__ import annotations

import numpy as np

from ikpy.graph.ir import Value
from ikpy.vision.axial import AxialRotation, check_head_size, places
from ikpy.vision.embedding import FixedEmbedding
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.images import Pixels
from ikpy.vision.merging import merge_factor
from ikpy.vision.projector import Projector, Source
from ikpy.vision.tiling import tiled

ROPE_BASE = 10000.0
MAX_TILES_PER_SIDE = 3


class Llama4Projector(Projector):
    """Tiles of the picture, then all of it in one."""

    begin = "<|image_start|>"
    end = "<|image_end|>"

    def load(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.factor = merge_factor(source.keys, self.params)
        check_head_size(self.params.head_size, self.path)
        self.embedding = FixedEmbedding(weights, self.params, token_last=True)
        self.tower = VisionTransformer(weights, self.params.with_exact_gelu)
        self.first = weights.linear("mm.model.mlp.1", n * self.factor**2)
        self.second = weights.linear("mm.model.mlp.2", self.first.n_out)
        self.last = weights.linear("mm.model.fc", self.second.n_out)

    @property
    def n_out(self) -> int:
        return self.last.n_out

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side, counts = self.params.image_size, range(1, MAX_TILES_PER_SIDE + 1)
        sizes = [(rows * side, columns * side) for columns in counts for rows in counts if rows * columns > 1]
        whole, lines = tiled(image, side, sizes)
        return [*(tile for line in lines for tile in line), whole]

    def build(self, b: PictureGraph) -> Value:
        down, across = (np.append(place + 1, 0) for place in places(b.rows, b.columns))  # 0: of the class token
        rotation = AxialRotation(b, self.params.head_size, across, down, ROPE_BASE)
        x = self.tower.layers(b, self.embedding.build(b), rotate=lambda b, heads: rotation(b, heads, neox=False))
        x = b.merged(self.embedding.patches_of(b, x), self.factor)
        for layer in (self.first, self.second):
            x = b.activated(b.linear(layer, x), "gelu_erf")
        return b.linear(self.last, x)
