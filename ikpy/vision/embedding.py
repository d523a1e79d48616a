"""Patch embeddings with learned positions of a fixed grid."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.params import VisionParams
from ikpy.vision.weights import ProjectorWeights


class FixedEmbedding:
    """x = patches W + b, a class token before them if the file has one, or behind them, plus the position of each."""

    def __init__(self, weights: ProjectorWeights, params: VisionParams, *, token_last: bool = False) -> None:
        self.token_last = token_last
        n, patches = params.n_embd, params.grid_size**2
        self.filters = weights.filters("v.patch_embd.weight", params.patch_size, n)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.token = weights.vector("v.class_embd", n)
        self.positions = weights.table("v.position_embd.weight", (n, patches + (self.token is not None)))

    def build(self, b: PictureGraph) -> Value:
        """f32 [D, T], T one more than there are patches with a class token."""
        if self.token is None:
            x = b.graph.mul_mat(self.filters, b.patches, self.bias)
        else:
            x = b.with_row(
                self.token,
                b.n_patches,
                lambda rows: b.graph.mul_mat(self.filters, b.patches, self.bias, dst=rows),
                last=self.token_last,
            )
        return b.graph.add(x, self.positions)

    def patches_of(self, b: PictureGraph, x: Value) -> Value:
        """The rows of x [D, T] that are those of patches."""
        return x.slice(1, int(self.token is not None and not self.token_last), b.n_patches)
