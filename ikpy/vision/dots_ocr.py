"""dots.ocr (arXiv:2512.02498)."""

from __future__ import annotations

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Limits
from ikpy.vision.native_size import NativeSizeProjector
from ikpy.vision.projector import Source

MERGER_EPS = 1e-6
"""Epsilon of the norm in the projector; files do not say it."""


class DotsOcrProjector(NativeSizeProjector):
    """RMSNorm and gated networks, a LayerNorm before squares are joined; the file says how large pictures are."""

    begin = "<|img|>"
    end = "<|endofimg|>"
    merge_key = "projector.scale_factor"
    rms = True

    def load_rest(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters = weights.filters("v.patch_embd.weight", self.params.patch_size, n)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.norm = weights.norm("mm.post_norm", n)
        self.merger_norm = weights.norm("mm.input_norm", n)
        self.up = weights.linear("mm.0", n * self.merge**2)
        self.down = weights.linear("mm.2", self.up.n_out)

    def read_limits(self, source: Source) -> Limits:
        return self.file_limits(source)

    @property
    def n_out(self) -> int:
        return self.down.n_out

    def build(self, b: PictureGraph) -> Value:
        x = b.graph.mul_mat(self.filters, b.patches, self.bias)
        x = self.tower.norm(b, self.norm, self.tower.layers(b, x, rotate=self.rotation(b)))
        x = b.layer_norm(self.merger_norm, x, MERGER_EPS)
        return self.projected(b, self.up, self.down, self.joined(x))
