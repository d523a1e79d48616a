"""Resizing of pictures as llama.cpp does it: Pillow's antialiased filters in whole numbers, and bars on two sides."""

from __future__ import annotations

import math

import numpy as np

from ikpy.errors import ResourceError
from ikpy.vision.images import MAX_PIXELS, Pixels

Size = tuple[int, int]
"""Height and width."""
Colour = tuple[int, int, int]
BLACK: Colour = (0, 0, 0)
F32 = np.float32


def check_size(size: Size) -> None:
    """ResourceError for a size that no encoder can want: a damaged file says so, or a picture is much too narrow."""
    if size[0] * size[1] > MAX_PIXELS:
        raise ResourceError(f"a picture would get {size[1]} x {size[0]} pixels; at most {MAX_PIXELS} are possible")


def stretched(image: Pixels, size: Size, method: str) -> Pixels:
    """The picture in another size. method: bilinear, bicubic or lanczos."""
    from PIL import Image  # late: text needs none of it

    if image.shape[:2] == size:
        return image
    check_size(size)
    resampling = Image.Resampling[method.upper()]
    # Width, then height, with whole numbers between: in one call Pillow may exchange the two, which rounds otherwise.
    wide = Image.fromarray(image).resize((size[1], image.shape[0]), resampling)
    return np.asarray(wide.resize(size[::-1], resampling))


def padded(image: Pixels, size: Size, method: str, colour: Colour = BLACK) -> Pixels:
    """The picture in its own proportions in the middle of another size, the rest in a colour."""
    height, width = image.shape[:2]
    if (height, width) == size:
        return image
    check_size(size)
    scale = min(F32(size[1]) / F32(width), F32(size[0]) / F32(height))
    inner = min(math.ceil(F32(height) * scale), size[0]), min(math.ceil(F32(width) * scale), size[1])
    out = np.empty((*size, 3), np.uint8)
    out[:] = colour
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    out[top : top + inner[0], left : left + inner[1]] = stretched(image, inner, method)
    return out
