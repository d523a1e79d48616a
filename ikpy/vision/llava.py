"""LLaVA (arXiv:2310.03744): CLIP's states before its last layer, and a network of two matrices.

LLaVA-NeXT (1.6) also looks at tiles of larger pictures, as llama.cpp does: without rows between lines of tiles.
"""

from __future__ import annotations

from typing import ClassVar

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.keys import Keys
from ikpy.vision.embedding import FixedEmbedding
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.images import Pixels
from ikpy.vision.params import MAX_SIZE, integers
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import Colour, Size, padded
from ikpy.vision.tiling import tiled
from ikpy.vision.weights import Linear, ProjectorWeights

GREY = (122, 116, 104)
"""Bars beside pictures: CLIP's mean colour."""


def feature_layers(keys: Keys, n_layer: int, usual: int) -> list[int]:
    """Layers before which the states are read, from clip.vision.feature_layer; n_layer: behind all of them."""
    layers = sorted(set(integers(keys, "feature_layer"))) or [usual]
    if not all(0 <= layer <= n_layer for layer in layers):
        raise FileFormatError(f"{keys.gguf.path}: clip.vision.feature_layer names layers outside 0 to {n_layer}")
    return layers


def pinpoints(keys: Keys) -> list[Size]:
    """Sizes that pictures are cut into tiles in, of clip.vision.image_grid_pinpoints: width, height, width, ...

    FileFormatError for sizes that no tiles fit.
    """
    numbers = integers(keys, "image_grid_pinpoints")
    side = keys.u32("vision.image_size")
    if len(numbers) % 2 or not all(0 < n <= MAX_SIZE and n % side == 0 for n in numbers):
        raise FileFormatError(f"{keys.gguf.path}: clip.vision.image_grid_pinpoints holds no sizes of tiles of {side}")
    return list(zip(numbers[1::2], numbers[::2], strict=True))


class LlavaProjector(Projector):
    """States of several layers may stand side by side (Granite Vision). n_left_out: last layers that are not run where
    the file does not say which are; bars: beside pictures."""

    n_left_out: ClassVar[int] = 1
    bars: ClassVar[Colour] = GREY

    def load(self, source: Source) -> None:
        self.sizes = pinpoints(source.keys)
        n_layer = self.params.n_layer
        self.layers = feature_layers(source.keys, n_layer, n_layer - self.n_left_out)
        self.embedding = FixedEmbedding(source.weights, self.params)
        self.tower = VisionTransformer(source.weights, self.params, n_layer=self.layers[-1])
        self.load_projection(source.weights, self.params.n_embd * len(self.layers))

    def load_projection(self, weights: ProjectorWeights, n_in: int) -> None:
        """What follows the encoder, for states of n_in elements."""
        self.first = weights.linear("mm.0", n_in)
        n = self.first.n_out
        self.first_norm, self.last_norm = weights.norm_if("mm.1", n), None
        self.second: Linear | None
        if self.first_norm is not None and weights.has("mm.3.weight"):  # Yi-VL
            self.second = weights.linear("mm.3", n)
            self.last_norm = weights.norm("mm.4", self.second.n_out)
        else:
            self.second = weights.linear_if("mm.2", n)

    @property
    def n_out(self) -> int:
        return (self.second or self.first).n_out

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side = self.params.image_size
        if not self.sizes:
            return [padded(image, (side, side), "bicubic", self.bars)]
        whole, rows = tiled(image, side, self.sizes)
        return [*(tile for row in rows for tile in row), whole]

    def build(self, b: PictureGraph) -> Value:
        return self.project(b, self.states(b))

    def states(self, b: PictureGraph) -> Value:
        """Of every patch, f32 [D * number of layers, n]."""
        taken: list[Value] = []
        last = self.tower.layers(b, self.embedding.build(b), tap=self.layers[:-1], taken=taken)
        return b.side_by_side([self.embedding.patches_of(b, x) for x in (*taken, last)])

    def project(self, b: PictureGraph, x: Value) -> Value:
        """f32 [n_out, n] of states [n_in, n]."""
        x, eps = b.linear(self.first, x), self.params.eps
        if self.first_norm is not None:
            x = b.layer_norm(self.first_norm, x, eps)
        x = b.graph.unary(x, "gelu_erf")
        if self.second is not None:
            x = b.linear(self.second, x)
        return x if self.last_norm is None else b.layer_norm(self.last_norm, x, eps)
