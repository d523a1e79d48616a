"""SigLIP and a network of two matrices on every patch: Phi-4 with pictures in their proportions, Janus Pro."""

from __future__ import annotations

from ikpy.errors import UsageError
from ikpy.graph.ir import Value
from ikpy.vision.embedding import FixedEmbedding
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Limits, fitting_size, near_square
from ikpy.vision.images import Pixels
from ikpy.vision.params import size
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import padded
from ikpy.vision.stretched_positions import StretchedEmbedding

MAX_PIXELS = (1 << 31) - 1
GREY = (127, 127, 127)


class Phi4Projector(Projector):
    """Phi-4 reasoning with vision: positions are stretched to the picture."""

    def load(self, source: Source) -> None:
        weights, keys = source.weights, source.keys
        self.limits = Limits(
            size(keys, "image_min_pixels", most=MAX_PIXELS), size(keys, "image_max_pixels", most=MAX_PIXELS)
        )
        if self.limits.least > self.limits.most:
            raise UsageError(f"{self.path}: clip.vision.image_min_pixels is larger than image_max_pixels")
        self.embedding = StretchedEmbedding(weights, self.params)
        self.tower = VisionTransformer(weights, self.params)
        self.mlp = weights.mlp("mm.0", "mm.2", self.params.n_embd)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    @property
    def largest(self) -> tuple[int, int]:
        return near_square(self.limits.most // self.params.patch_size**2, 1)

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        height, width = image.shape[:2]
        return [padded(image, fitting_size(height, width, self.params.patch_size, self.limits), "bilinear")]

    def build(self, b: PictureGraph) -> Value:
        x = self.tower.layers(b, self.embedding.build(b))
        return b.mlp(self.mlp, x, "gelu_erf")


class JanusProjector(Projector):
    """Janus Pro: pictures are brought to the size of the encoder."""

    def load(self, source: Source) -> None:
        weights = source.weights
        self.exact = self.params.with_exact_gelu
        self.embedding = FixedEmbedding(weights, self.params)
        self.tower = VisionTransformer(weights, self.exact)
        self.mlp = weights.mlp("mm.0", "mm.1", self.params.n_embd)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side = self.params.image_size
        return [padded(image, (side, side), "bicubic", GREY)]

    def build(self, b: PictureGraph) -> Value:
        x = self.tower.layers(b, self.embedding.build(b))
        return b.mlp(self.mlp, x, self.exact.activation)
