"""Command A Vision: SigLIP 2, squares of patches side by side, a gated matrix and another one; tiles."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.embedding import FixedEmbedding
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.images import Pixels
from ikpy.vision.merging import merge_factor
from ikpy.vision.params import size
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import stretched
from ikpy.vision.tiling import least_enlarged, rows_of_tiles

MAX_TILES = 256
LINE_BREAK = "<|IMG_LINE_BREAK|>"


class Cohere2Projector(Projector):
    """Tiles of the stretched picture, then, if there are several, all of it in one; a mark follows each."""

    begin = "<|START_OF_IMG|>"
    end = "<|END_OF_IMG|>"

    def load(self, source: Source) -> None:
        weights = source.weights
        self.factor = merge_factor(source.keys, self.params)
        self.most = size(source.keys, "preproc_max_tiles", most=MAX_TILES)
        self.embedding = FixedEmbedding(weights, self.params)
        self.tower = VisionTransformer(weights, self.params)
        self.first = weights.linear("mm.1", self.params.n_embd * self.factor**2)
        if self.first.n_out % 2:
            raise FileFormatError(f"{self.path}: tensor 'mm.1.weight' has {self.first.n_out} rows, no two halves")
        self.second = weights.linear("mm.2", self.first.n_out // 2)

    @property
    def n_out(self) -> int:
        return self.second.n_out

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side = self.params.image_size
        rows, columns = least_enlarged(image.shape[:2], side, self.most)
        lines = rows_of_tiles(stretched(image, (rows * side, columns * side), "bicubic"), (side, side))
        tiles = [tile for line in lines for tile in line]
        if len(tiles) > 1:
            tiles.append(stretched(image, (side, side), "bicubic"))
        return [piece for tile in tiles for piece in (tile, LINE_BREAK)]

    def build(self, b: PictureGraph) -> Value:
        x = b.merged(self.tower.layers(b, self.embedding.build(b)), self.factor)
        x, half = b.linear(self.first, x), self.first.n_out // 2
        return b.linear(self.second, b.graph.gated(x.slice0(half, half), x.slice0(0, half), "silu"))
