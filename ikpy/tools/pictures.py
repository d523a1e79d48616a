"""Pictures from files, their contents, base64 and objects of other libraries."""

from __future__ import annotations

import base64
import hashlib
import os
from functools import partial
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

    @classmethod
    def of_file(cls, data: bytes, name: str = "image") -> Picture:
        """The picture of a file's content. It is decoded at once, and again when rows of it are made a second time.

        Raises an IkpyError that calls it by the name.
        """
        from ikpy.vision.images import decode_image

        read = partial(decode_image, data, name)
        return cls(hashlib.sha256(data).digest(), read, read())

    @classmethod
    def of_pixels(cls, pixels: Pixels) -> Picture:
        """A picture that is decoded already."""
        key = hashlib.sha256(f"pixels {pixels.shape}\n".encode() + pixels.tobytes()).digest()
        return cls(key, lambda: pixels)


def read_picture(path: str) -> Picture:
    """The picture in a file. Raises an IkpyError that names it."""
    return Picture.of_file(read_media_file(path), path)


def read_media_file(path: str) -> bytes:
    """Content of a file. Raises UsageError that names it."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def picture_from(value: Any) -> Picture:
    """A picture given as the name of a file, its content, a PIL image, or an array uint8 [height, width, 3].

    Raises an IkpyError.
    """
    if isinstance(value, str) and value.startswith("data:"):
        value = from_base64(value.partition(",")[2])
    if isinstance(value, (str, os.PathLike)):
        return read_picture(os.fspath(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Picture.of_file(bytes(value))
    if hasattr(value, "convert"):  # an image of PIL
        value = value.convert("RGB")
    pixels = np.asarray(value)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise UsageError("a picture is a file, bytes of one, a PIL image, or an array uint8 [height, width, 3]")
    return Picture.of_pixels(np.ascontiguousarray(pixels))


def from_base64(text: str) -> bytes:
    """Bytes of base64 text, none if it is wrong; line ends in it and missing padding do no harm."""
    clean = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(clean + "=" * (-len(clean) % 4), validate=True)
    except ValueError:  # or characters that are not ASCII
        return b""
