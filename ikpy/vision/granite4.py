"""Granite 4 Vision: SigLIP, whose states behind several layers windows of queries read (Q-Former, arXiv:2301.12597)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.blocks import split_heads
from ikpy.vision.embedding import FixedEmbedding
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import Ints, ranges_of, square_order
from ikpy.vision.images import Pixels
from ikpy.vision.llava import pinpoints
from ikpy.vision.params import integers, size
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import Size, padded, stretched
from ikpy.vision.rows import MediaRows
from ikpy.vision.tiling import best_resolution, rows_of_tiles
from ikpy.vision.weights import Linear, Mlp, Norm, ProjectorWeights

HEAD = 64
"""Elements of a head of the queries; files do not say it."""
QUERY_EPS = 1e-12
"""Epsilon of all norms behind the first one of a block."""


@dataclass
class Attention:
    """Matrices of queries, keys, values and results, and the norm behind them."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    norm: Norm

    @classmethod
    def load(cls, weights: ProjectorWeights, prefix: str, n: int) -> Attention:
        """The tensors that begin so."""
        q, k, v, out = (weights.linear(f"{prefix}_{name}", n, n) for name in ("q", "k", "v", "out"))
        return cls(q, k, v, out, weights.norm(f"{prefix}_norm", n))


@dataclass
class Block:
    """One part of the rows. layer: behind which the states are read. corner: of every square of four patches the one
    that queries begin from; -1: their mean."""

    layer: int
    corner: int
    first_norm: Norm
    queries: NDArray[np.float32]
    places: NDArray[np.float32]
    norm: Norm
    own: Attention
    other: Attention
    network: Mlp
    last_norm: Norm
    out: Linear


class Granite4Projector(Projector):
    """A picture is seen as a whole and in tiles, which lie in a grid whose lines a learned row ends; rows of tiles that
    see bars alone are left out. Every row has several parts, which are added behind layers of the text model."""

    end = "\n"

    def load(self, source: Source) -> None:
        weights, keys, params = source.weights, source.keys, self.params
        self.sizes = pinpoints(keys)
        if not self.sizes:
            raise FileFormatError(f"{self.path}: key clip.vision.image_grid_pinpoints not found")
        self.window, self.query = (size(keys, f"projector.{name}_side") for name in ("window", "query"))
        side = params.grid_size
        if side % self.window or self.window != 2 * self.query:
            raise FileFormatError(
                f"{self.path}: windows of {self.window} patches become {self.query} in {side}; half of them must"
            )
        self.embedding = FixedEmbedding(weights, params)
        layers, corners = integers(keys, "feature_layer"), integers(keys, "projector.spatial_offsets")
        if not layers or len(layers) != len(corners) or not all(0 <= il < params.n_layer for il in layers):
            raise FileFormatError(f"{self.path}: clip.vision.feature_layer {layers} names no layers for {corners}")
        if not all(-1 <= corner < 4 for corner in corners):
            raise FileFormatError(f"{self.path}: clip.vision.projector.spatial_offsets {corners} are not -1 to 3")
        self.tower = VisionTransformer(weights, params, n_layer=max(layers) + 1)
        self.blocks = [self.block(weights, i, *each) for i, each in enumerate(zip(layers, corners, strict=True))]
        self.n_deep = len(self.blocks) - 1
        self.line_end = np.tile(weights.array("v.image_newline", (self.blocks[0].out.n_out,)), len(self.blocks))

    def block(self, weights: ProjectorWeights, i: int, layer: int, corner: int) -> Block:
        """The tensors of a block."""
        n, p, n_text = self.params.n_embd, f"v.proj_blk.{i}", self.params.projection_dim
        if n % HEAD:
            raise FileFormatError(f"{self.path}: {n} elements are no heads of {HEAD}")
        return Block(
            layer,
            corner,
            weights.norm(f"{p}.norm", n),
            weights.array(f"{p}.query", (n, self.query**2)),
            weights.array(f"{p}.img_pos", (n, self.window**2)),
            weights.norm(f"{p}.post_norm", n),
            Attention.load(weights, f"{p}.self_attn", n),
            Attention.load(weights, f"{p}.cross_attn", n),
            weights.mlp(f"{p}.ffn_up", f"{p}.ffn_down", n),
            weights.norm(f"{p}.ffn_norm", n),
            weights.linear(f"{p}.linear", n, n_text),
        )

    @property
    def n_out(self) -> int:
        return len(self.blocks) * self.blocks[0].out.n_out

    # pictures

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side = self.params.image_size
        refined = padded(image, best_resolution(image.shape[:2], self.sizes), "bicubic")
        tiles = [tile for row in rows_of_tiles(refined, (side, side)) for tile in row]
        return [stretched(image, (side, side), "bicubic"), *tiles]

    def encode(self, image: Pixels) -> list[str | MediaRows]:
        side = self.params.image_size
        height, width = (n // side for n in best_resolution(image.shape[:2], self.sizes))
        whole, *tiles = (self.rows(tile).values for tile in self.tiles(image) if not isinstance(tile, str))
        small = self.params.grid_size // 2
        grid = np.stack(tiles).reshape(height, width, small, small, -1).swapaxes(1, 2)
        grid = grid.reshape(height * small, width * small, -1)
        lines = grid[inside(grid.shape[:2], image.shape[:2])]
        ends = np.broadcast_to(self.line_end, (len(lines), 1, len(self.line_end)))
        found = np.concatenate([lines, ends], axis=1).reshape(-1, len(self.line_end))
        return [MediaRows(np.concatenate([whole, found])), self.end]

    # graph

    def build(self, b: PictureGraph) -> Value:
        x, states = self.embedding.build(b), {}
        for il, layer in enumerate(self.tower.blocks):
            states[il] = x = self.tower.layer(b, layer, x, None, None)
        return b.side_by_side([self.part(b, block, states[block.layer]) for block in self.blocks])

    def part(self, b: PictureGraph, block: Block, states: Value) -> Value:
        """f32 [n_text, n] of states [D, 4 n], line by line."""
        g, side, small = b.graph, self.params.grid_size, self.params.grid_size // 2
        x = b.layer_norm(block.first_norm, states, self.params.eps)
        count = (side // self.window) ** 2
        if block.corner < 0:
            queries = b.mean_pooled(x, 2)
        else:
            corners = np.arange(side**2).reshape(side, side)[block.corner // 2 :: 2, block.corner % 2 :: 2]
            queries = g.get_rows(x, b.indices(corners.reshape(-1)))
        order = square_order(small, small, self.query)
        queries = g.get_rows(queries, b.indices(order))
        queries = g.add(queries, b.floats(np.tile(block.queries, (count, 1))))
        patches = g.get_rows(x, b.indices(square_order(side, side, self.window)))
        patches = g.add(patches, b.floats(np.tile(block.places, (count, 1))))
        y = b.layer_norm(block.norm, queries, QUERY_EPS)
        y = self.attended(b, block.own, y, y, window_ranges(count, self.query**2, self.query**2))
        y = self.attended(b, block.other, y, patches, window_ranges(count, self.query**2, self.window**2))
        y = b.layer_norm(block.last_norm, g.add(y, b.mlp(block.network, y, "gelu_erf")), QUERY_EPS)
        return b.linear(block.out, g.get_rows(y, b.indices(np.argsort(order))))

    def attended(self, b: PictureGraph, layer: Attention, x: Value, of: Value, ranges: Ints) -> Value:
        """Normed sum of x [D, T] and what it attends to of others."""
        q, k, v = (split_heads(b.linear(m, y), HEAD) for m, y in ((layer.q, x), (layer.k, of), (layer.v, of)))
        out = b.linear(layer.out, b.attention(q, k, v, scale=HEAD**-0.5, ranges=ranges))
        return b.layer_norm(layer.norm, b.graph.add(out, x), QUERY_EPS)


def window_ranges(count: int, n_queries: int, n_keys: int) -> Ints:
    """First key and the one behind the last that the queries of every window see, [T, 2]."""
    spans = ranges_of(np.full(count, n_keys))[::n_keys]
    return np.repeat(spans, n_queries, axis=0)


def inside(grid: Size, picture: Size) -> tuple[slice, slice]:
    """Lines and columns of a grid that a picture of these proportions in its middle lies in."""
    (rows, columns), (height, width) = grid, picture
    if width * rows > height * columns:
        edge = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(edge, rows - edge), slice(None)
    edge = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(None), slice(edge, columns - edge)
