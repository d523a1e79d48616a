"""InternVL (arXiv:2312.14238): InternViT, squares of patches side by side, a norm and two matrices; tiles."""

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
from ikpy.vision.resize import Size
from ikpy.vision.tiling import tiled

NORM_EPS = 1e-5
"""Of the norm before the matrices; the file has that of the encoder."""
RMS_SIZE = (3200, 45)
"""Elements and layers of the encoder whose norms are RMSNorm (InternViT-6B)."""
MAX_TILES = 256


class InternVLProjector(Projector):
    """Tiles of the picture, then all of it in one."""

    begin = "<img>"
    end = "</img>"

    def load(self, source: Source) -> None:
        weights, keys = source.weights, source.keys
        n = self.params.n_embd
        self.factor = merge_factor(keys, self.params)
        self.sizes = tile_sizes(
            self.params.image_size,
            size(keys, "preproc_min_tiles", default=1, most=MAX_TILES),
            size(keys, "preproc_max_tiles", default=12, most=MAX_TILES),
        )
        if not self.sizes:
            raise FileFormatError(f"{keys.gguf.path}: clip.vision.preproc_min_tiles is larger than preproc_max_tiles")
        self.embedding = FixedEmbedding(weights, self.params)
        self.tower = VisionTransformer(weights, self.params.with_exact_gelu, rms=(n, self.params.n_layer) == RMS_SIZE)
        self.norm = weights.norm("mm.model.mlp.0", n * self.factor**2)
        self.mlp = weights.mlp("mm.model.mlp.1", "mm.model.mlp.3", n * self.factor**2)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        whole, rows = tiled(image, self.params.image_size, self.sizes)
        return [*(tile for row in rows for tile in row), whole]

    def build(self, b: PictureGraph) -> Value:
        x = self.tower.layers(b, self.embedding.build(b))
        x = b.merged(self.embedding.patches_of(b, x), self.factor)
        x = b.layer_norm(self.norm, x, NORM_EPS)
        return b.mlp(self.mlp, x, "gelu_erf")


def tile_sizes(side: int, least: int, most: int) -> list[Size]:
    """Sizes of grids of least to most tiles, by columns and then rows, each at least `least`."""
    return [
        (rows * side, columns * side)
        for columns in range(least, most + 1)
        for rows in range(max(-(-least // columns), least), min(most // columns, most) + 1)
    ]
