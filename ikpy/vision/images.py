"""Pictures from the bytes of their files, as uint8 RGB."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, ResourceError, UsageError

MAX_PIXELS = 89_000_000
"""Pixels of the largest picture that is decoded, far more than any encoder looks at; Pillow, too, takes larger ones for
attacks."""
MAX_SIDE = (1 << 16) - 1
"""Pixels of the longest side, the most that JPEG can say: work memory of resizing grows with it."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM")


class UnknownFormatError(FileFormatError):
    """What is none of FORMATS."""


Pixels = NDArray[np.uint8]
"""Picture [height, width, 3], red, green and blue."""


def decode_image(data: bytes, name: str = "image") -> Pixels:
    """The picture of a file, turned as its EXIF orientation says; the first frame of an animation.

    Transparency is left out: the colours stay as they are stored, as in llama.cpp. name: what errors call it. Raises
    FileFormatError for what is no picture or is damaged, ResourceError for one that is too large.
    """
    from PIL import Image, ImageOps  # late: text needs none of it

    if not data:
        raise UsageError(f"{name} is empty: give a picture ({', '.join(FORMATS)})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large pictures, refused below, and of what is left out
            with Image.open(io.BytesIO(data), formats=FORMATS) as file:
                _check_size(*file.size, name)
                return _rgb(ImageOps.exif_transpose(file))
    except (ResourceError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise ResourceError(f"{name} is too large: {error}") from None
    except Image.UnidentifiedImageError:
        raise UnknownFormatError(f"{name} is no picture of a known format ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise FileFormatError(f"{name} cannot be decoded: {error}") from None


def _check_size(width: int, height: int, name: str) -> None:
    """ResourceError for a picture that is too large."""
    if width * height > MAX_PIXELS:
        raise ResourceError(f"{name} has {width} x {height} pixels; at most {MAX_PIXELS} are decoded")
    if max(width, height) > MAX_SIDE:
        raise ResourceError(f"{name} has {width} x {height} pixels; sides of at most {MAX_SIDE} are decoded")


def _rgb(image: Any) -> Pixels:
    """Pixels of a decoded picture; of 16 bits the upper 8 count."""
    if image.mode.startswith("I"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.mode in {"RGBA", "LA"}:
        image = image.convert("RGBA")
        return np.ascontiguousarray(np.asarray(image)[..., :3])
    return np.ascontiguousarray(np.asarray(image.convert("RGB")))
