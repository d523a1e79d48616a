"""DeepSeek-OCR (arXiv:2510.18234): the encoder of Segment Anything, CLIP behind it, states of both side by side."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.convolution import halved
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import ranges_of
from ikpy.vision.images import Pixels
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import check_size, stretched
from ikpy.vision.sam import PATCH, SamEncoder, smoothed
from ikpy.vision.tiling import closest_grid

WHOLE, TILE = 1024, 640
"""Pixels of a side of the whole picture and of a tile."""
LEAST_TILES, MOST_TILES = 2, 9
GREY = (127, 127, 127)
CLIP_EPS = 1e-5


class DeepseekOcrProjector(Projector):
    """Tiles of larger pictures, all of a line together, then the whole. A row of the file ends every line of states,
    another the whole picture."""

    end = "\n"
    whole, tile = WHOLE, TILE

    def load(self, source: Source) -> None:
        weights = source.weights
        self.params = replace(
            self.params, patch_size=PATCH, image_size=self.whole, eps=CLIP_EPS, activation="gelu_quick"
        )
        n = self.params.n_embd
        self.sam = SamEncoder(weights, source.keys)
        if self.sam.n_out != n:
            raise FileFormatError(f"{self.path}: states of {self.sam.n_out} elements are read by an encoder of {n}")
        self.class_token = weights.table("v.class_embd", (n,))
        name = "v.position_embd.weight"
        count = weights.shape(name)[1]
        side = math.isqrt(count - 1)
        if side**2 != count - 1:
            raise FileFormatError(f"{self.path}: the {count} positions of {name} are no square and one more")
        table = weights.array(name, (n, count))
        self.first_position, self.positions = table[:1], table[1:].reshape(side, side, n)
        self.tower = VisionTransformer(weights, self.params)
        self.projection = weights.linear("mm.model.fc", 2 * n)
        self.line_end, self.last = (
            weights.table(f"v.{part}", (self.n_out,)) for part in ("image_newline", "view_seperator")
        )

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    @property
    def largest(self) -> tuple[int, int]:
        """A line of tiles."""
        side = self.tile // PATCH
        return side, side * MOST_TILES

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        height, width = image.shape[:2]
        lines: list[Pixels] = []
        if max(height, width) > self.tile:
            rows, columns = closest_grid((height, width), self.tile, LEAST_TILES, MOST_TILES)
            refined = stretched(image, (rows * self.tile, columns * self.tile), "bicubic")
            lines = [refined[y : y + self.tile] for y in range(0, len(refined), self.tile)]
        return [*lines, centred(image, self.whole)]

    def patches(self, image: Pixels) -> tuple[NDArray[np.float32], int, int]:
        """Those of a tile together."""
        patches, rows, columns = super().patches(image)
        order = np.arange(rows * columns).reshape(rows, columns // rows, rows).transpose(1, 0, 2)
        return patches[order.reshape(-1)], rows, columns

    def build(self, b: PictureGraph) -> Value:
        side, count = b.rows, b.columns // b.rows
        seen = self.sam.build(b, side, count)
        side = halved(halved(side))
        found = b.linear(self.projection, b.side_by_side([self.clip(b, seen, side, count), seen]))
        return self.in_lines(b, found, side, count, is_whole=b.rows * PATCH == self.whole)

    def clip(self, b: PictureGraph, x: Value, side: int, count: int) -> Value:
        """States [D, T] of CLIP, whose patches are squares of states, each with a class token in front."""
        g, n, each = b.graph, x.shape[0], side**2
        whole = g.new(n, count * (each + 1))
        for i in range(count):
            g.copy(self.class_token.reshape(n, 1), whole.slice(1, i * (each + 1), 1))
            g.copy(x.slice(1, i * each, each), whole.slice(1, i * (each + 1) + 1, each))
        positions = np.concatenate([self.first_position, smoothed(self.positions, side)])
        whole = g.add(whole, b.floats(np.tile(positions, (count, 1))))
        ranges = ranges_of(np.full(count, each + 1))
        whole = self.tower.layers(b, whole, ranges=lambda layer: ranges)
        places = np.arange(count * (each + 1)).reshape(count, each + 1)[:, 1:]
        return g.get_rows(whole, b.indices(places.reshape(-1)))

    def in_lines(self, b: PictureGraph, x: Value, side: int, count: int, *, is_whole: bool) -> Value:
        """Rows [n_out, T] of squares beside each other line by line, with those that end lines and pictures."""
        g, (n, total) = b.graph, x.shape[:2]
        rows = g.new(n, total + 2)
        g.copy(x, rows.slice(1, 0, total))
        g.copy(self.line_end.reshape(n, 1), rows.slice(1, total, 1))
        g.copy(self.last.reshape(n, 1), rows.slice(1, total + 1, 1))
        lines = np.arange(total).reshape(count, side, side).transpose(1, 0, 2).reshape(side, -1)
        order = np.concatenate([lines, np.full((side, 1), total)], axis=1).reshape(-1)
        return g.get_rows(rows, b.indices(np.append(order, total + 1) if is_whole else order))


def centred(image: Pixels, side: int) -> Pixels:
    """The picture in its own proportions in the middle of a grey square; sizes and places are rounded to even numbers
    where two are as near, as Pillow does it."""
    height, width = image.shape[:2]
    check_size((side, side))
    longer = max(height, width)
    inner = (max(round(height / longer * side), 1), max(round(width / longer * side), 1))
    out = np.empty((side, side, 3), np.uint8)
    out[:] = GREY
    top, left = (round((side - n) * 0.5) for n in inner)
    out[top : top + inner[0], left : left + inner[1]] = stretched(image, inner, "bicubic")
    return out
