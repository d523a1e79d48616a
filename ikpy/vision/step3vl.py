"""Step3-VL (arXiv:2601.09668) and Step 3.7 Flash: a tower rotated by column and row, two convolutions, one matrix;
square windows of large and of narrow pictures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.axial import AxialRotation, check_head_size, places
from ikpy.vision.convolution import convolution, convolved, halved
from ikpy.vision.encoder import VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import resampled
from ikpy.vision.images import Pixels
from ikpy.vision.native_size import ROPE_BASE
from ikpy.vision.params import MAX_IMAGE_SIZE, size
from ikpy.vision.projector import Projector, Source
from ikpy.vision.resize import Size, check_size, stretched
from ikpy.vision.stretched_positions import StretchedEmbedding

F32 = np.float32
WINDOW = 504
"""Pixels of a side of what the tower sees of a window."""
LONGEST = 3024
NARROW, VERY_NARROW = 1.5, 4
"""Ratios of the sides from which a small picture has windows, and from which those of a large one are smaller."""
THIN = 32
"""Pixels of the shorter side below which a very narrow picture becomes a square."""
REST = F32(0.2)
"""Parts of a window that are cut off at most."""


class Step3VLProjector(Projector):
    """Windows come row by row, then the whole picture, stretched to a square.

    Pictures are made smaller by antialiased filters, as the published code does it; llama.cpp does it without for the
    whole picture.
    """

    def load(self, source: Source) -> None:
        weights, n = source.weights, self.params.n_embd
        self.longest = size(source.keys, "preproc_image_size", default=0, least=0, most=MAX_IMAGE_SIZE) or LONGEST
        if self.params.patch_size > min(WINDOW, self.params.image_size):
            raise FileFormatError(f"{self.path}: patches of {self.params.patch_size} pixels are larger than pictures")
        self.embedding = Embedding(weights, self.params)
        self.tower = VisionTransformer(weights, self.params)
        check_head_size(self.tower.head_size, self.path)
        self.first = convolution(weights, "mm.0", n)
        self.second = convolution(weights, "mm.1", self.first.n_out)
        self.projection = weights.linear("mm.model.fc", self.second.n_out)

    @property
    def n_out(self) -> int:
        return self.projection.n_out

    @property
    def largest(self) -> tuple[int, int]:
        side = max(WINDOW, self.params.image_size) // self.params.patch_size
        return side, side

    def tiles(self, image: Pixels) -> list[str | Pixels]:
        image, side = self.prepared(image), self.params.image_size
        pieces: list[str | Pixels] = []
        for y, row in enumerate(windows(image, window_size(image.shape[:2], side))):
            pieces += ["<patch_newline>"] if y else []
            for window in row:
                pieces += ["<patch_start>", stretched(window, (WINDOW, WINDOW), "bilinear"), "<patch_end>"]
        return [*pieces, "<im_start>", stretched(image, (side, side), "bilinear"), "<im_end>"]

    def prepared(self, image: Pixels) -> Pixels:
        """Thin ones with black to the right or below, large ones made smaller."""
        height, width = image.shape[:2]
        if min(height, width) < THIN and ratio(height, width) > VERY_NARROW:
            image = filled(image, (max(height, width),) * 2)
            height, width = image.shape[:2]
        if max(height, width) <= self.longest:
            return image
        scale = F32(self.longest) / F32(max(height, width))
        return stretched(image, (max(1, int(F32(height) * scale)), max(1, int(F32(width) * scale))), "bilinear")

    def build(self, b: PictureGraph) -> Value:
        row, column = places(b.rows, b.columns)
        turned = AxialRotation(b, self.tower.head_size, column, row, ROPE_BASE)
        x = self.tower.layers(b, self.embedding.build(b), rotate=lambda b, heads: turned(b, heads, neox=False))
        x = convolved(b, self.first, x, (b.rows, b.columns))
        x = convolved(b, self.second, x, (halved(b.rows), halved(b.columns)))
        return b.linear(self.projection, x)


class Embedding(StretchedEmbedding):
    """Its table is interpolated between the middles of patches without smoothing."""

    def positions(self, rows: int, columns: int) -> NDArray[np.float32]:
        return resampled(self.table, rows, columns, "linear")


# windows


def ratio(height: int, width: int) -> np.float32:
    """The longer side by the shorter one."""
    return F32(max(height, width)) / F32(min(height, width))


def window_size(size: Size, side: int) -> int:
    """Pixels of a side of the windows of a picture, 0: it has none. side: what the tower sees of the whole picture."""
    longer, shorter = max(size), min(size)
    if longer <= side:
        return shorter if ratio(*size) > NARROW else 0
    return min(shorter, WINDOW) if ratio(*size) > VERY_NARROW else WINDOW


def windows(image: Pixels, side: int) -> list[list[Pixels]]:
    """Squares of a picture that is stretched to whole ones, row by row; a side that is less than one is filled up."""
    if not side:
        return []
    height, width = (whole_windows(n, side) for n in image.shape[:2])
    image = stretched(image, (height, width), "bilinear")
    return [
        [filled(image[y : y + side, x : x + side], (side, side)) for x in range(0, width, side)]
        for y in range(0, height, side)
    ]


def whole_windows(length: int, side: int) -> int:
    """The multiple of a window's side that a longer length becomes."""
    count = F32(length) / F32(side)
    if count < 1:
        return length
    whole = np.floor(count)
    return side * (int(whole) + int(count - whole > REST))


def filled(image: Pixels, size: Size) -> Pixels:
    """The picture in the upper left corner of a black one."""
    if image.shape[:2] == size:
        return image
    check_size(size)
    out = np.zeros((*size, 3), np.uint8)
    out[: image.shape[0], : image.shape[1]] = image
    return out
