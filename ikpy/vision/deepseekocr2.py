"""DeepSeek-OCR 2 (arXiv:2601.20552): the encoder of Segment Anything, and a causal transformer behind it.

The transformer reads the states of a picture and as many learned queries behind them. States see all states, a query
all states and the queries up to its own; what becomes of the queries are the rows of the picture.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.convolution import halved
from ikpy.vision.deepseekocr import centred
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.images import Pixels
from ikpy.vision.params import size
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import stretched
from ikpy.vision.sam import PATCH, SamEncoder
from ikpy.vision.tiling import closest_grid, rows_of_tiles

WHOLE, TILE = 1024, 768
"""Pixels of a side of the whole picture and of a tile; names of their queries hold them."""
LEAST_TILES, MOST_TILES = 2, 6
ROPE_BASE = 1e6


class DeepseekOcr2Projector(Projector):
    """Tiles of larger pictures line by line, then the whole, which a row of the file ends."""

    end = "\n"
    whole, tile = WHOLE, TILE

    def load(self, source: Source) -> None:
        weights = source.weights
        self.params = replace(self.params, patch_size=PATCH, image_size=self.whole, activation="silu")
        n = self.params.n_embd
        self.sam = SamEncoder(weights, source.keys)
        if self.sam.n_out != n:
            raise FileFormatError(f"{self.path}: states of {self.sam.n_out} elements are read by an encoder of {n}")
        self.tower = VisionTransformer(weights, self.params, rms=True)
        self.check_heads(size(source.keys, "attention.head_count_kv"))
        self.queries = {
            side: weights.table(f"v.resample_query_{name}.weight", (n, states_of(side)))
            for side, name in ((self.tile, TILE), (self.whole, WHOLE))
        }
        self.projection = weights.linear("mm.model.fc", n)
        self.last = weights.table("v.view_seperator", (self.n_out,))

    def check_heads(self, n_kv: int) -> None:
        """FileFormatError for other sizes than whole pairs, another number of heads of keys than the file says, and
        missing tensors that other encoders of the kind may lack.
        """
        if not self.tower.blocks:
            raise FileFormatError(f"{self.path}: clip.vision.block_count is 0")
        head = self.params.head_size
        if head % 2:
            raise FileFormatError(f"{self.path}: heads of {head} elements cannot be rotated")
        if self.tower.post_norm is None:
            raise FileFormatError(f"{self.path}: tensor 'v.post_ln.weight' not found")
        for il, block in enumerate(self.tower.blocks):
            if block.gate is None:
                raise FileFormatError(f"{self.path}: tensor 'v.blk.{il}.ffn_gate.weight' not found")
            if block.k.n_out != n_kv * head:
                raise FileFormatError(
                    f"{self.path}: v.blk.{il} has keys of {block.k.n_out} elements, not {n_kv} heads of {head} "
                    "(clip.vision.attention.head_count_kv)"
                )

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        height, width = image.shape[:2]
        parts: list[str | Pixels] = []
        if max(height, width) > self.tile:
            rows, columns = closest_grid((height, width), self.tile, LEAST_TILES, MOST_TILES)
            refined = stretched(image, (rows * self.tile, columns * self.tile), "bicubic")
            parts = [tile for line in rows_of_tiles(refined, (self.tile, self.tile)) for tile in line]
        return [*parts, centred(image, self.whole)]

    def build(self, b: PictureGraph) -> Value:
        g, pixels = b.graph, b.rows * PATCH
        found = self.read(b, self.sam.build(b, b.rows, 1), self.queries[pixels])
        rows = b.linear(self.projection, found)
        if pixels != self.whole:
            return rows
        return b.with_row(self.last, rows.shape[1], lambda part: g.copy(rows, part), last=True)

    def read(self, b: PictureGraph, x: Value, queries: Value) -> Value:
        """What becomes of the queries [D, n] behind the states [D, m] of a picture."""
        g, d = b.graph, x.shape[0]
        n_states, n_queries = x.shape[1], queries.shape[1]
        whole = g.new(d, n_states + n_queries)
        g.copy(x, whole.slice(1, 0, n_states))
        g.copy(queries, whole.slice(1, n_states, n_queries))
        places = np.arange(n_states + n_queries, dtype=np.int32)
        table = g.rope_table(b.indices(places), self.params.head_size, None, (ROPE_BASE, 1.0, 0.0, 1.0, 0.0, 0.0))
        ranges = seen_places(n_states, n_queries)
        whole = self.tower.layers(
            b, whole, rotate=lambda b, heads: b.graph.rope(heads, table, neox=True), ranges=lambda layer: ranges
        )
        return whole.slice(1, n_states, n_queries)


def states_of(pixels: int) -> int:
    """States of a square of so many pixels a side."""
    return int(halved(halved(pixels // PATCH)) ** 2)


def seen_places(n_states: int, n_queries: int) -> NDArray[np.int32]:
    """First place that each sees and the one behind the last: i32 [n_states + n_queries, 2]."""
    ends = np.maximum(np.arange(1, n_states + n_queries + 1), n_states)
    return np.stack([np.zeros_like(ends), ends], axis=1).astype(np.int32)
