"""Idefics 3 and SmolVLM (arXiv:2408.12637): SigLIP, squares of patches side by side, one matrix; tiles."""

from __future__ import annotations

import math

from ikpy.graph.ir import Value
from ikpy.vision.embedding import FixedEmbedding
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.images import Pixels
from ikpy.vision.merging import merge_factor
from ikpy.vision.params import MAX_IMAGE_SIZE, size
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import Size, stretched
from ikpy.vision.tiling import rows_of_tiles

AROUND = "<fake_token_around_image>"


class Idefics3Projector(Projector):
    """The longer side of every picture becomes preproc_image_size; its tiles come row by row, then all of it."""

    def load(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.factor = merge_factor(source.keys, self.params)
        self.longest = size(source.keys, "preproc_image_size", most=MAX_IMAGE_SIZE)
        self.embedding = FixedEmbedding(weights, self.params)
        self.tower = VisionTransformer(weights, self.params)
        self.projection = weights.linear("mm.model.fc", n * self.factor**2)

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    def refined(self, image: Pixels) -> Pixels:
        """What is cut into tiles: the picture with `longest` as its longer side, then with multiples of a tile's."""
        side, resized = self.params.image_size, stretched(image, longest_side(image.shape[:2], self.longest), "lanczos")
        return stretched(resized, whole_tiles(resized.shape[:2], side), "lanczos")

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side, refined = self.params.image_size, self.refined(image)
        pieces: list[str | Pixels] = []
        for y, row in enumerate(rows_of_tiles(refined, (side, side))):
            pieces += ["\n"] if y else []
            for x, tile in enumerate(row):
                pieces += [f"{AROUND}<row_{y + 1}_col_{x + 1}>", tile]
        return [*pieces, "\n\n", AROUND, "<global-img>", stretched(refined, (side, side), "lanczos"), AROUND]

    def build(self, b: PictureGraph) -> Value:
        x = self.tower.layers(b, self.embedding.build(b))
        return b.linear(self.projection, b.merged(x, self.factor))


def longest_side(size: Size, longest: int) -> Size:
    """The size with its longer side as given, in its own proportions; the shorter one is even."""
    height, width = size
    if width >= height:
        return max(even(int(longest / (width / height))), 1), longest
    return longest, max(even(int(longest * (width / height))), 1)


def even(n: int) -> int:
    """The next even number."""
    return n + n % 2


def whole_tiles(size: Size, side: int) -> Size:
    """The size with both sides multiples of a tile's: the longer one, then the other in proportion to it."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / ratio) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * ratio) / side) * side
