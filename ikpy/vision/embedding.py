"""Patch embeddings with learned positions of a fixed grid."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.params import VisionParams
from ikpy.vision.weights import ProjectorWeights


class FixedEmbedding:
    """x = patches W + b, a class token before them if the file has one, plus the position of each."""

    def __init__(self, weights: ProjectorWeights, params: VisionParams) -> None:
        n, patches = params.n_embd, params.grid_size**2
        self.filters = weights.filters("v.patch_embd.weight", params.patch_size, n)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.first = weights.vector("v.class_embd", n)
        self.positions = weights.table("v.position_embd.weight", (n, patches + (self.first is not None)))

    def build(self, b: PictureGraph) -> Value:
        """f32 [D, T], T one more than there are patches with a class token."""
        if self.first is None:
            x = b.graph.mul_mat(self.filters, b.patches, self.bias)
        else:
            x = b.with_first_row(
                self.first, b.n_patches, lambda rest: b.graph.mul_mat(self.filters, b.patches, self.bias, dst=rest)
            )
        return b.graph.add(x, self.positions)
