"""Nemotron Nano VL 2: C-RADIO with register tokens, squares of patches side by side, a norm and two matrices."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.images import Pixels
from ikpy.vision.merging import merge_factor
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import padded

NORM_EPS = 1e-6


class NemotronProjector(Projector):
    """Pictures are brought to the size of the encoder."""

    def load(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.factor = merge_factor(source.keys, self.params)
        self.filters = weights.filters("v.patch_embd.weight", self.params.patch_size, n)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.positions = weights.table("v.position_embd.weight", (n, self.params.grid_size**2))
        self.registers = weights.table("v.class_embd", (n, weights.shape("v.class_embd")[1]))
        self.tower = VisionTransformer(weights, self.params.with_exact_gelu)
        self.norm = weights.table("mm.model.mlp.0.weight", (n * self.factor**2,))
        self.mlp = weights.mlp("mm.model.mlp.1", "mm.model.mlp.3", n * self.factor**2)

    @property
    def n_out(self) -> int:
        return self.mlp.n_out

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side = self.params.image_size
        return [padded(image, (side, side), "bicubic")]

    def build(self, b: PictureGraph) -> Value:
        g, n_registers = b.graph, self.registers.shape[1]
        patches = g.add(g.mul_mat(self.filters, b.patches, self.bias), self.positions)
        x = g.new(self.params.n_embd, n_registers + b.n_patches)
        g.copy(self.registers, x.slice(1, 0, n_registers))
        g.copy(patches, x.slice(1, n_registers, b.n_patches))
        x = self.tower.layers(b, x).slice(1, n_registers, b.n_patches)
        x = g.rms_norm(b.merged(x, self.factor), self.norm, NORM_EPS)
        return b.mlp(self.mlp, x, "relu_squared")
