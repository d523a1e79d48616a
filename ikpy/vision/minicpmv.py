"""MiniCPM-V (arXiv:2408.01800): SigLIP with positions in shares of a picture, a resampler of learned queries; tiles."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.blocks import split_heads
from ikpy.models.keys import Keys
from ikpy.vision.axial import places
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import near_square
from ikpy.vision.images import Pixels
from ikpy.vision.params import VisionParams
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import Size, padded, stretched
from ikpy.vision.tiling import rows_of_tiles
from ikpy.vision.weights import ProjectorWeights

F32 = np.float32
POSITIONS = 70
"""Positions of a side, whatever the size of a picture."""
HEAD_SIZE = 128
MAX_TILES = 9
WAVE_BASE = 10000.0
OLD_VERSION = 2
"""MiniCPM-V 2.5, whose tiles have the marks of pictures."""
VERSIONS = (2, 3, 4, 5, 6, 100045)


class MiniCPMVPictures(Projector):
    """All of the picture, then its tiles row by row, in sizes that are multiples of `step` pixels."""

    factor = 1
    marks_tiles_as_pictures = False

    def load(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.load_rest(source)
        self.filters = weights.filters("v.patch_embd.weight", self.params.patch_size, n)
        self.bias = weights.vector("v.patch_embd.bias", n)
        self.positions = weights.array("v.position_embd.weight", (n, POSITIONS**2))
        self.tower = VisionTransformer(weights, self.params)

    @abstractmethod
    def load_rest(self, source: Source) -> None:
        """Takes the keys of the family and what follows the encoder."""

    @property
    def step(self) -> int:
        """Pixels that sides of pictures are multiples of."""
        return self.params.patch_size * self.factor

    @property
    def largest(self) -> tuple[int, int]:
        """Sides are rounded."""
        return near_square((-(-self.params.image_size // self.step) + 1) ** 2, self.factor)

    def whole(self, image: Pixels) -> Pixels | None:
        """A picture that has no tiles in its final size; None: it has some."""
        side = self.params.image_size
        return stretched(image, (side, side), "bicubic") if max(image.shape[:2]) <= side else None

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        side, size = self.params.image_size, (image.shape[0], image.shape[1])
        alone = self.whole(image)
        if alone is not None:
            return ["<image>", alone, "</image>"]
        whole = stretched(image, like_a_square(size, side, self.step, enlarge=False), "bicubic")
        grid = best_grid(size, side)
        refined = padded(image, refined_size(size, grid, side, self.step), "bicubic")
        marks = ("<image>", "</image>") if self.marks_tiles_as_pictures else ("<slice>", "</slice>")
        pieces: list[str | Pixels] = ["<image>", whole, "</image>"]
        pieces += ["<slice>"] if self.marks_tiles_as_pictures else []
        for y, row in enumerate(rows_of_tiles(refined, (refined.shape[0] // grid[0], refined.shape[1] // grid[1]))):
            pieces += ["\n"] if y else []
            for tile in row:
                pieces += [marks[0], tile, marks[1]]
        return [*pieces, "</slice>"] if self.marks_tiles_as_pictures else pieces

    def embedded(self, b: PictureGraph) -> Value:
        """Patches with their positions, f32 [D, n]."""
        down, across = places(b.rows, b.columns)
        down, across = down * POSITIONS // b.rows, across * POSITIONS // b.columns
        x = b.graph.mul_mat(self.filters, b.patches, self.bias)
        return b.graph.add(x, b.floats(self.positions[down * POSITIONS + across]))


class MiniCPMVProjector(MiniCPMVPictures):
    """Up to MiniCPM-V 4.5: a resampler."""

    def load_rest(self, source: Source) -> None:
        self.marks_tiles_as_pictures = model_version(source.keys) == OLD_VERSION
        self.resampler = Resampler(source.weights, self.params)

    @property
    def n_out(self) -> int:
        return self.resampler.n_out

    def build(self, b: PictureGraph) -> Value:
        return self.resampler.build(b, self.tower.layers(b, self.embedded(b)))


class Resampler:
    """Learned queries attend to all patches of a picture; keys know their places by sines and cosines."""

    def __init__(self, weights: ProjectorWeights, params: VisionParams) -> None:
        self.eps = params.eps
        n = self.n_out = weights.shape("resampler.kv.weight")[1]
        if n % HEAD_SIZE:
            raise FileFormatError(f"{weights.gguf.path}: rows of {n} elements are no heads of {HEAD_SIZE}")
        self.query = weights.table("resampler.query", (n, weights.shape("resampler.query")[1]))
        self.inputs = weights.linear("resampler.kv", params.n_embd, n)
        self.q, self.k, self.v, self.out = (
            weights.linear(f"resampler.attn.{part}", n, n) for part in "q k v out".split()
        )
        self.query_norm, self.input_norm, self.last_norm = (
            weights.norm(f"resampler.ln_{part}", n) for part in ("q", "kv", "post")
        )
        self.projection = weights.linear("resampler.proj", n, n)

    def build(self, b: PictureGraph, x: Value) -> Value:
        """f32 [n_out, queries] of the states of patches [D, n]."""
        g = b.graph
        values = b.layer_norm(self.input_norm, b.linear(self.inputs, x), self.eps)
        keys = g.add(values, b.floats(waves(b.rows, b.columns, self.n_out)))
        parts = (
            (self.q, b.layer_norm(self.query_norm, self.query, self.eps)),
            (self.k, keys),
            (self.v, values),
        )
        q, k, v = (split_heads(b.linear(layer, part), HEAD_SIZE) for layer, part in parts)
        attended = b.linear(self.out, b.attention(q, k, v, scale=HEAD_SIZE**-0.5))
        return b.linear(self.projection, b.layer_norm(self.last_norm, attended, self.eps))


def model_version(keys: Keys) -> int:
    """clip.minicpmv_version, one whose marks are known; files without are of the oldest."""
    found = keys.gguf.metadata.get("clip.minicpmv_version", OLD_VERSION)
    if isinstance(found, bool) or not isinstance(found, int | np.integer):
        raise FileFormatError(f"{keys.gguf.path}: key clip.minicpmv_version must hold an integer")
    version = int(found) or OLD_VERSION
    if version not in VERSIONS:
        raise UnsupportedError(
            f"{keys.gguf.path}: clip.minicpmv_version {version} is not known; {', '.join(map(str, VERSIONS))} are"
        )
    return version


def waves(rows: int, columns: int, n: int) -> NDArray[np.float32]:
    """Places of patches [rows * columns, n]: sines and cosines of the column, then of the row."""
    rates = WAVE_BASE ** -(np.arange(n // 4) / (n // 4))
    down, across = (place[:, None] * rates for place in places(rows, columns))
    return np.concatenate([np.sin(across), np.cos(across), np.sin(down), np.cos(down)], axis=1).astype(F32)


# sizes


def whole_steps(n: int, step: int) -> int:
    """The nearest multiple of step, at least one."""
    return max(math.floor(float(F32(n) / F32(step)) + 0.5) * step, step)


def like_a_square(size: Size, side: int, step: int, *, enlarge: bool) -> Size:
    """The size in its own proportions with as many pixels as a square, in multiples of step; smaller ones stay as they
    are unless enlarged."""
    height, width = size
    if width * height > side * side or enlarge:
        ratio = F32(width) / F32(height)
        height = int(F32(side) / np.sqrt(ratio))
        width = int(F32(height) * ratio)
    return whole_steps(height, step), whole_steps(width, step)


def best_grid(size: Size, side: int) -> tuple[int, int]:
    """Rows and columns of the tiles of a picture: about as many as squares fit, in its proportions."""
    height, width = size
    n = min(math.ceil(float(F32(width) * F32(height) / F32(side * side))), MAX_TILES)
    counts = [count for count in (n - 1, n, n + 1) if count != 1 and count <= MAX_TILES]
    grids = [(count // columns, columns) for count in counts for columns in range(1, count + 1) if count % columns == 0]
    wanted = F32(math.log(float(F32(width) / F32(height))))
    return min(grids, key=lambda grid: abs(wanted - F32(math.log(grid[1] / grid[0]))), default=(1, 1))


def refined_size(size: Size, grid: tuple[int, int], side: int, step: int) -> Size:
    """The size in which a picture is cut into tiles of about a square."""
    tile = whole_steps(size[0], grid[0]) // grid[0], whole_steps(size[1], grid[1]) // grid[1]
    height, width = like_a_square(tile, side, step, enlarge=True)
    return height * grid[0], width * grid[1]
