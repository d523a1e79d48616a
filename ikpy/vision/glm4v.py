"""GLM-4.1V, 4.5V, 4.6V (arXiv:2507.01006) and GLM-OCR."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import resampled
from ikpy.vision.native_size import NativeSizeProjector
from ikpy.vision.projector import Source
from ikpy.vision.weights import Linear

PROJECTOR_EPS = 1e-5
"""Epsilon of the norm in the projector; files do not say it."""


class Glm4vProjector(NativeSizeProjector):
    """RMSNorm and gated networks; squares of patches become rows by one matrix, which a gated network follows.

    Patches are normed and have learned positions that are stretched over the picture; those of GLM-OCR have neither.
    """

    begin = "<|begin_of_image|>"
    end = "<|end_of_image|>"
    rms = True

    def load_rest(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters = self.two_frames(weights)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.norm = weights.norm_if("v.norm_embd", n)
        name = "v.position_embd.weight"
        self.positions = self.square_table(weights, name) if weights.has(name) else None
        merger = self.joining_matrix(weights, "mm.patch_merger.weight")
        wide = merger.shape[1]
        self.merger = Linear(merger, weights.vector("mm.patch_merger.bias", wide))
        self.projection = weights.linear("mm.model.fc", wide, wide)
        self.projection_norm = weights.norm("mm.post_norm", wide)
        self.gate = weights.linear("mm.gate", wide)
        self.up = weights.linear("mm.up", wide, self.gate.n_out)
        self.down = weights.linear("mm.down", self.gate.n_out)

    @property
    def n_out(self) -> int:
        return self.down.n_out

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return rows // self.merge, columns // self.merge

    def build(self, b: PictureGraph) -> Value:
        g = b.graph
        x = g.mul_mat(self.filters, b.patches, self.bias)
        if self.norm is not None:
            x = self.tower.norm(b, self.norm, x)
        if self.positions is not None:
            stretched = resampled(self.positions, b.rows, b.columns, "bicubic")
            x = g.add(x, b.floats(stretched[self.order(b.rows, b.columns)]))
        x = b.linear(self.merger, self.joined(self.tower.layers(b, x, rotate=self.rotation(b))))
        x = b.layer_norm(self.projection_norm, b.linear(self.projection, x), PROJECTOR_EPS)
        x = b.activated(x, "gelu_erf")
        gate = b.activated(b.linear(self.gate, x), self.params.activation)
        return b.linear(self.down, g.mul(gate, b.linear(self.up, x)))
