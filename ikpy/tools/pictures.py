"""Pictures from files, their contents, base64 and objects of other libraries."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy.errors import UsageError
from ikpy.tools.media import Media

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]


class Picture(Media):
    """A picture; ``content`` is its pixels uint8 [height, width, 3]."""

    what = "image"

    @staticmethod
    def decode(data: bytes, name: str) -> Pixels:
        from ikpy.vision.images import decode_image

        return decode_image(data, name)

    @classmethod
    def of_pixels(cls, pixels: Pixels) -> Picture:
        """A picture that is decoded already."""
        key = hashlib.sha256(f"pixels {pixels.shape}\n".encode() + pixels.tobytes()).digest()
        return cls(key, lambda: pixels)


def picture_from(value: Any) -> Picture:
    """A picture given as the name of a file, its content, a PIL image, or an array uint8 [height, width, 3].

    Raises an IkpyError.
    """
    if picture := Picture.of_given(value):
        return picture
    if hasattr(value, "convert"):  # an image of PIL
        value = value.convert("RGB")
    pixels = np.asarray(value)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise UsageError("a picture is a file, bytes of one, a PIL image, or an array uint8 [height, width, 3]")
    return Picture.of_pixels(np.ascontiguousarray(pixels))
