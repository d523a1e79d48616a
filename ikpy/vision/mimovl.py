"""MiMo-VL, the encoder of MiMo-V2.5."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.blocks import split_heads
from ikpy.vision.encoder import EncoderLayer, Rotate
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Ints, Limits
from ikpy.vision.grouped import GroupedTransformer
from ikpy.vision.params import size
from ikpy.vision.projector import Source
from ikpy.vision.qwen2vl import QwenProjector
from ikpy.vision.weights import ProjectorWeights

FULL, BY_ROWS, BY_COLUMNS = -1, 0, 1
"""What a layer sees: the picture, or a stretch around each patch in squares line by line, or column by column."""
MERGER_EPS = 1e-6
"""Epsilon of the norm in the projector; files do not say it."""


@dataclass
class SinkLayer(EncoderLayer):
    """Sinks are of the heads of queries."""

    sinks: Value | None = None


class SinkTransformer(GroupedTransformer):
    """Heads have sinks in layers that see stretches."""

    def _load_layer(self, weights: ProjectorWeights, prefix: str) -> SinkLayer:
        layer = super()._load_layer(weights, prefix)
        return SinkLayer(**vars(layer), sinks=weights.vector(f"{prefix}.attn_sinks", self.params.n_head))

    def attention(
        self, b: PictureGraph, layer: EncoderLayer, x: Value, rotate: Rotate | None, ranges: NDArray | None
    ) -> Value:
        q, k, v = (split_heads(b.linear(part, x), self.head_size) for part in (layer.q, layer.k, layer.v))
        if rotate is not None:
            q, k = rotate(b, q), rotate(b, k)
        sinks = layer.sinks if isinstance(layer, SinkLayer) and ranges is not None else None
        return b.linear(layer.out, b.attention(q, k, v, scale=self.head_size**-0.5, ranges=ranges, sinks=sinks))


class MiMoVLProjector(QwenProjector):
    """As Qwen2.5-VL, but patches of most layers see those up to `window` before and behind them.

    What comes before is counted in squares line by line in some layers and column by column in others.
    """

    def load_tower(self, source: Source) -> SinkTransformer:
        keys, name = source.keys, "vision.wa_pattern_mode"
        self.modes = keys.integers(name, self.params.n_layer)
        if not self.modes or set(self.modes) - {FULL, BY_ROWS, BY_COLUMNS}:
            raise FileFormatError(f"{self.path}: clip.{name} {self.modes} says not what each layer sees")
        self.window = size(keys, "window_size", least=0)
        tower = SinkTransformer(source.weights, self.params, size(keys, "attention.head_count_kv"))
        for il, (mode, block) in enumerate(zip(self.modes, tower.blocks, strict=True)):
            if mode != FULL and block.sinks is None:  # type: ignore[attr-defined]
                raise FileFormatError(f"{self.path}: tensor 'v.blk.{il}.attn_sinks' not found")
        return tower

    def load_rest(self, source: Source) -> None:
        super().load_rest(source)
        self.norm = source.weights.norm("v.post_ln", self.params.n_embd)

    def read_limits(self, source: Source) -> Limits:
        return self.file_limits(source)

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return None

    def spans(self, n: int) -> Ints:
        """First patch that each of n sees and the one behind the last, [n, 2]."""
        place = np.arange(n)
        return np.stack([(place - self.window).clip(0), (place + self.window + 1).clip(max=n)], axis=1)

    def reordered(self, b: PictureGraph, x: Value, squares: Ints) -> Value:
        """States [D, T] with their squares in another order."""
        return b.graph.get_rows(self.joined(x), b.indices(squares)).reshape(*x.shape[:2])

    def build(self, b: PictureGraph) -> Value:
        m = self.merge
        down = np.arange(b.n_patches // m**2).reshape(b.rows // m, b.columns // m).T.reshape(-1)
        place = self.order(b.rows, b.columns)
        turns = self.turning(b, place), self.turning(b, place.reshape(-1, m**2)[down].reshape(-1))
        ranges, order = self.spans(b.n_patches), BY_ROWS
        x = b.graph.mul_mat(self.filters, b.patches)
        for block, mode in zip(self.tower.blocks, self.modes, strict=True):
            wanted = BY_COLUMNS if mode == BY_COLUMNS else BY_ROWS
            if wanted != order:
                x = self.reordered(b, x, down if wanted == BY_COLUMNS else np.argsort(down))
            order = wanted
            x = self.tower.layer(b, block, x, turns[order], None if mode == FULL else ranges)
        if order == BY_COLUMNS:
            x = self.reordered(b, x, np.argsort(down))
        return self.projected(b, self.up, self.down, self.joined(b.layer_norm(self.norm, x, MERGER_EPS)))
