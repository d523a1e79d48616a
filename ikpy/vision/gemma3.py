"""Gemma 3 (arXiv:2503.19786): SigLIP, means of squares of patches, a norm and one matrix."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.vision.embedding import FixedEmbedding
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.images import Pixels
from ikpy.vision.merging import merge_factor
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import padded


class Gemma3Projector(Projector):
    """Pictures are brought to the size of the encoder; their rows see each other."""

    begin = "<start_of_image>"
    end = "<end_of_image>"
    both_ways = True

    def load(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.factor = merge_factor(source.keys, self.params, default=4)
        self.embedding = FixedEmbedding(weights, self.params)
        self.tower = VisionTransformer(weights, self.params)
        self.norm = weights.table("mm.soft_emb_norm.weight", (n,))
        name = "mm.input_projection.weight"
        self.projection = weights.source.transposed(name, (weights.shape(name)[0], n))

    @property
    def n_out(self) -> int:
        return self.projection.shape[1]

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side = self.params.image_size
        return [padded(image, (side, side), "bilinear")]

    def build(self, b: PictureGraph) -> Value:
        x = self.tower.layers(b, self.embedding.build(b))
        x = b.graph.rms_norm(b.mean_pooled(x, self.factor), self.norm, self.params.eps)
        return b.graph.mul_mat(self.projection, x)
