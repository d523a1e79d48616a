"""HunyuanOCR (arXiv:2511.19575) and HunyuanVL: a tower of any size of picture, two convolutions, a row behind every
line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ikpy.graph.ir import Value
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Ints, Limits, resampled
from ikpy.vision.images import Pixels
from ikpy.vision.native_size import MAX_TOKENS, NativeSizeProjector
from ikpy.vision.projector import Source
from ikpy.vision.resize import stretched
from ikpy.vision.rows import MediaRows
from ikpy.vision.weights import Linear, ProjectorWeights, value_of


class HunyuanProjector(NativeSizeProjector):
    """Squares of patches become rows by a convolution, GELU and two matrices. A learned row follows every line, others
    stand before and behind the picture; all of them are normed.

    Positions are interpolated as the published code does it, for grids a tenth of a patch larger than they are. The
    first and the last row have places in the text like tokens, those between them have places in a grid.
    """

    begin = "<｜hy_place▁holder▁no▁100｜>"
    end = "<｜hy_place▁holder▁no▁101｜>"
    default_tokens = (256, MAX_TOKENS)
    counted = True

    def load_tower(self, source: Source) -> VisionTransformer:
        self.exact = self.params.with_exact_gelu
        return VisionTransformer(source.weights, self.exact)

    def load_rest(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.filters = weights.filters("v.patch_embd.weight", self.params.patch_size, n)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.positions = self.square_table(weights, "v.position_embd.weight")
        self.first_norm = weights.norm("mm.pre_norm", n)
        joining = self.joining_matrix(weights, "mm.0.weight")
        self.first = Linear(joining, weights.vector("mm.0.bias", joining.shape[1]))
        self.second = pointwise(weights, "mm.2", joining.shape[1])
        self.third = weights.linear("mm.model.fc", self.second.n_out)
        self.line_end = weights.table("v.image_newline", (self.second.n_out,))
        n_out = self.third.n_out
        self.ends = value_of(np.stack([weights.array(f"mm.image_{name}", (n_out,)) for name in ("begin", "end")]))
        self.last_norm = weights.norm("mm.post_norm", n_out)

    def read_limits(self, source: Source) -> Limits:
        """llama.cpp takes those of the file before the user's."""
        return self.limits_of_all(source)

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        """Resized as in llama.cpp; the published code takes cubic filters."""
        return [stretched(image, self.fitted(image), "lanczos")]

    @property
    def n_out(self) -> int:
        return self.third.n_out

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return rows // self.merge, columns // self.merge + 1

    def encode(self, image: Pixels) -> list[str | MediaRows]:
        pieces: list[str | MediaRows] = []
        for piece in super().encode(image):
            if isinstance(piece, str):
                pieces.append(piece)
            else:
                first, inside, last = np.split(piece.values, [1, -1])
                pieces += [MediaRows(first), replace(piece, values=inside, counted=self.counted), MediaRows(last)]
        return pieces

    def build(self, b: PictureGraph) -> Value:
        g = b.graph
        positions = resampled(self.positions, b.rows, b.columns, "tenth")[self.order(b.rows, b.columns)]
        x = g.add(g.mul_mat(self.filters, b.patches, self.bias), b.floats(positions))
        x = g.rms_norm(self.tower.layers(b, x), self.first_norm.weight, self.params.eps)
        x = b.linear(self.first, self.joined(x))
        x = b.activated(x, self.exact.activation)
        x = b.with_row(self.line_end, x.shape[1], lambda rows: b.linear(self.second, x, dst=rows), last=True)
        n = x.shape[1]
        whole = g.new(self.n_out, n + 2)
        b.linear(self.third, x, dst=whole.slice(1, 0, n))
        g.copy(self.ends, whole.slice(1, n, 2))
        return g.get_rows(g.rms_norm(whole, self.last_norm.weight, self.params.eps), b.indices(self.layout(b)))

    def layout(self, b: PictureGraph) -> Ints:
        """Of every row its place among the squares, line by line, the line end, and the rows around the picture."""
        height, width = b.rows // self.merge, b.columns // self.merge
        n = height * width
        lines = np.pad(np.arange(n).reshape(height, width), ((0, 0), (0, 1)), constant_values=n)
        return np.array([n + 1, *lines.reshape(-1), n + 2])


def pointwise(weights: ProjectorWeights, name: str, n_in: int) -> Linear:
    """A matrix that files hold as a convolution of single pixels [1, 1, n_in, n_out], and its bias."""
    n_out = weights.shape(f"{name}.weight")[-1]
    matrix = weights.source.take(f"{name}.weight", (1, 1, n_in, n_out), (n_in, n_out)).reshape(n_in, n_out)
    return Linear(matrix, weights.vector(f"{name}.bias", n_out))
