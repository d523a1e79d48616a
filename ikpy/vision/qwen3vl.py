"""Qwen3-VL (arXiv:2511.21631), and the pictures of Qwen3.5 and Qwen3.6."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import resampled
from ikpy.vision.projector import Source
from ikpy.vision.qwen2vl import QwenProjector
from ikpy.vision.weights import Linear, Norm, ProjectorWeights


@dataclass
class DeepMerger:
    """What makes further parts of rows of the states behind a layer."""

    norm: Norm
    up: Linear
    down: Linear


class PositionedProjector(QwenProjector):
    """As Qwen2-VL, with learned positions that are stretched over the picture."""

    def load_rest(self, source: Source) -> None:
        super().load_rest(source)
        weights = source.weights
        self.bias = weights.vector("v.patch_embd.bias", self.params.n_embd)
        self.positions = self.square_table(weights, "v.position_embd.weight")

    def embedded(self, b: PictureGraph) -> Value:
        """Patches with their positions, f32 [D, n]."""
        positions = resampled(self.positions, b.rows, b.columns, "corners")[self.order(b.rows, b.columns)]
        return b.graph.add(b.graph.mul_mat(self.filters, b.patches, self.bias), b.floats(positions))


class Qwen3VLProjector(PositionedProjector):
    """States behind some layers become further parts of the rows, which are added behind the first layers of the text
    model (DeepStack, arXiv:2406.04334); files of Qwen3.5 have none.
    """

    def load_rest(self, source: Source) -> None:
        super().load_rest(source)
        self.norm = source.weights.norm("v.post_ln", self.params.n_embd)
        self.deep = self._read_deep(source.weights)
        self.n_deep = len(self.deep)

    def _read_deep(self, weights: ProjectorWeights) -> dict[int, DeepMerger]:
        """Mergers by layer."""
        found, wide = {}, self.params.n_embd * self.merge**2
        for il in range(self.params.n_layer):
            prefix = f"v.deepstack.{il}"
            if weights.has(f"{prefix}.fc1.weight"):
                up = weights.linear(f"{prefix}.fc1", wide)
                down = weights.linear(f"{prefix}.fc2", up.n_out, self.down.n_out)
                found[il] = DeepMerger(weights.norm(f"{prefix}.norm", wide), up, down)
        return found

    @property
    def n_out(self) -> int:
        return super().n_out * (1 + self.n_deep)

    def build(self, b: PictureGraph) -> Value:
        x, rotate, parts = self.embedded(b), self.rotation(b), []
        for il, block in enumerate(self.tower.blocks):
            x = self.tower.layer(b, block, x, rotate, None)
            if (deep := self.deep.get(il)) is not None:
                normed = b.layer_norm(deep.norm, self.joined(x), self.params.eps)
                parts.append(self.projected(b, deep.up, deep.down, normed))
        x = self.tower.norm(b, self.norm, x)
        return b.side_by_side([self.projected(b, self.up, self.down, self.joined(x)), *parts])


class Ling3Projector(PositionedProjector):
    """Ling 3.0 VL: the tower of Qwen3-VL, whose states are normed before they are joined."""

    def load_rest(self, source: Source) -> None:
        super().load_rest(source)
        self.norm = source.weights.norm("mm.input_norm", self.params.n_embd)

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return None

    def build(self, b: PictureGraph) -> Value:
        x = self.tower.layers(b, self.embedded(b), rotate=self.rotation(b))
        x = self.tower.norm(b, self.norm, x)
        return self.projected(b, self.up, self.down, self.joined(x))
