"""Pictures from files: colours, orientation, what is refused; sizes as llama.cpp and its models want them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ikpy.errors import FileFormatError, IkpyError, ResourceError, UsageError
from ikpy.vision import images
from ikpy.vision.idefics3 import longest_side, whole_tiles
from ikpy.vision.images import decode_image
from ikpy.vision.resize import padded, stretched
from ikpy.vision.tiling import best_resolution, closest_grid, rows_of_tiles
from tests.cpu.gguf.damage import damage_bytes
from tests.cpu.media.tile_towers import picture

COLOURS = picture(5, 7)


def stored(image: Image.Image, format_name: str = "PNG", **options: Any) -> bytes:
    """Bytes of a picture file."""
    file = io.BytesIO()
    image.save(file, format_name, **options)
    return file.getvalue()


@pytest.mark.parametrize("format_name", ["PNG", "BMP", "PPM", "WEBP"])
def test_colours_of_formats_without_loss(format_name: str) -> None:
    options = {"lossless": True} if format_name == "WEBP" else {}
    found = decode_image(stored(Image.fromarray(COLOURS), format_name, **options))
    assert found.dtype == np.uint8 and np.array_equal(found, COLOURS)


def test_grey_and_palettes_become_colours() -> None:
    grey = COLOURS[..., 0].copy()
    assert np.array_equal(decode_image(stored(Image.fromarray(grey))), np.repeat(grey[..., None], 3, 2))
    wide = np.random.default_rng(2).integers(0, 65536, (5, 7)).astype(np.uint16)
    assert np.array_equal(decode_image(stored(Image.fromarray(wide)))[..., 1], wide >> 8)
    bits = COLOURS[..., 0] > 100
    assert np.array_equal(decode_image(stored(Image.fromarray(bits)))[..., 2], bits * 255)
    few = Image.fromarray(COLOURS).quantize(8)
    for data in (stored(few), stored(few, "GIF"), stored(few, transparency=1)):
        assert np.array_equal(decode_image(data), np.asarray(few.convert("RGB")))


def test_transparency_is_left_out() -> None:
    """The colours of transparent pixels count, as in llama.cpp."""
    seen = np.concatenate([COLOURS, picture(5, 7, seed=9)[..., :1]], 2)
    assert np.array_equal(decode_image(stored(Image.fromarray(seen))), COLOURS)
    found = decode_image(stored(Image.fromarray(seen[..., [0, 3]].copy(), "LA")))
    assert np.array_equal(found, np.repeat(COLOURS[..., :1], 3, 2))


@pytest.mark.filterwarnings("error")
def test_transparent_palettes_are_no_warning() -> None:
    palette = Image.fromarray(COLOURS).quantize(200)
    data = stored(palette, "PNG", transparency=bytes(range(200)))
    np.testing.assert_array_equal(decode_image(data), np.asarray(palette.convert("RGB")))


def test_a_photograph_is_turned_as_it_says() -> None:
    exif = Image.Exif()
    exif[0x112] = 6  # the camera was turned to the left
    smooth = np.add.outer(np.arange(40) * 3, np.arange(60) * 2)[..., None] // np.array([1, 2, 3])
    data = stored(Image.fromarray(smooth.astype(np.uint8)), "JPEG", exif=exif, quality=95)
    found = decode_image(data)
    assert found.shape == (60, 40, 3)
    assert np.abs(found.astype(int) - np.rot90(smooth, -1)).max() < 30


def test_the_first_frame_counts() -> None:
    frames = [Image.fromarray(picture(4, 4, seed=i)).quantize(8) for i in (1, 2)]
    found = decode_image(stored(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert np.array_equal(found, np.asarray(frames[0].convert("RGB")))


def test_what_is_no_picture() -> None:
    good = stored(Image.fromarray(picture(50, 50)), "JPEG")
    for data, error, message in (
        (b"", UsageError, "cat.png is empty: give a picture"),
        (b"hello", FileFormatError, "cat.png is no picture of a known format"),
        (stored(Image.fromarray(COLOURS), "TIFF"), FileFormatError, "is no picture of a known format"),
        (good[: len(good) // 2], FileFormatError, "cat.png cannot be decoded: image file is truncated"),
    ):
        with pytest.raises(error, match=message):
            decode_image(data, "cat.png")


def test_large_pictures_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    header = stored(Image.fromarray(COLOURS), "BMP")
    huge = header[:18] + (20000).to_bytes(4, "little") * 2 + header[26:]
    with pytest.raises(ResourceError, match="too large"):
        decode_image(huge)
    monkeypatch.setattr(images, "MAX_PIXELS", 34)
    with pytest.raises(ResourceError, match="image has 7 x 5 pixels; at most 34 are decoded"):
        decode_image(stored(Image.fromarray(COLOURS)))


def test_long_pictures_are_refused() -> None:
    """Few pixels in a line take much memory to be resized."""
    assert decode_image(stored(Image.new("RGB", (1, 65535)))).shape == (65535, 1, 3)
    with pytest.raises(ResourceError, match="image has 65536 x 1 pixels; sides of at most 65535 are decoded"):
        decode_image(stored(Image.new("RGB", (65536, 1))))


@pytest.mark.parametrize("make", [padded, stretched])
def test_no_encoder_wants_larger_pictures(make: Callable[..., np.ndarray]) -> None:
    with pytest.raises(ResourceError, match="would get 65536 x 32768 pixels; at most 89000000 are possible"):
        make(COLOURS, (32768, 65536), "bicubic")


@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP"])
def test_damaged_pictures(format_name: str) -> None:
    """A picture or one line."""
    random, good = Random(f"pictures {format_name}"), stored(Image.fromarray(picture(20, 30)), format_name)
    for _ in range(150):
        try:
            found = decode_image(damage_bytes(random, good))
        except IkpyError as error:
            assert "\n" not in str(error)
        else:
            assert found.ndim == 3 and found.shape[2] == 3 and found.dtype == np.uint8


# sizes


def resampled(image: np.ndarray, axis: int, n: int, weight: Callable[[float], float], reach: float) -> np.ndarray:
    """The picture with n pixels along an axis, by a filter as wide as the scale; shares have 22 bits."""
    lines = np.moveaxis(image.astype(np.int64), axis, -1)
    size = lines.shape[-1]
    if size == n:
        return image
    scale, out = size / n, np.empty((*lines.shape[:-1], n), np.int64)
    for i in range(n):
        middle, width = (i + 0.5) * scale, max(scale, 1)
        first, last = max(int(middle - reach * width + 0.5), 0), min(int(middle + reach * width + 0.5), size)
        shares = np.array([weight((x + 0.5 - middle) / width) for x in range(first, last)])
        whole = np.round(shares / shares.sum() * (1 << 22)).astype(np.int64)
        out[..., i] = (lines[..., first:last] @ whole + (1 << 21)) >> 22
    return np.moveaxis(np.clip(out, 0, 255), -1, axis)


def test_pictures_are_stretched_width_first() -> None:
    """As llama.cpp does it: the other order rounds otherwise."""

    def triangle(x: float) -> float:
        return max(0.0, 1 - abs(x))

    def cubic(x: float) -> float:
        x = abs(x)
        return 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0

    def lanczos(x: float) -> float:
        return float(np.sinc(x) * np.sinc(x / 3)) if abs(x) < 3 else 0.0

    image = picture(130, 61)
    for method, weight, reach in (("bilinear", triangle, 1), ("bicubic", cubic, 2), ("lanczos", lanczos, 3)):
        for height, width in ((56, 47), (131, 90), (130, 20), (200, 61)):
            expected = resampled(resampled(image, 1, width, weight, reach), 0, height, weight, reach)
            assert np.array_equal(stretched(image, (height, width), method), expected), (method, height, width)


def test_padding_keeps_proportions_and_fills_both_sides() -> None:
    found = padded(np.full((10, 31, 3), 9, np.uint8), (40, 40), "bicubic", (1, 2, 3))
    lines = np.flatnonzero((found == 9).all((1, 2)))
    assert (lines[0], lines[-1]) == (13, 25) and np.array_equal(found[0, 0], [1, 2, 3])
    assert np.array_equal(found[40 - 1], np.tile([1, 2, 3], (40, 1)))


def test_tiles_of_the_best_size() -> None:
    image = picture(6, 9)
    tiles = rows_of_tiles(image, (3, 3))
    assert [len(row) for row in tiles] == [3, 3] and np.array_equal(tiles[1][2], image[3:, 6:])
    sizes = [(100, 200), (200, 100), (200, 200), (100, 300)]
    assert best_resolution((50, 100), sizes) == (100, 200)
    assert best_resolution((300, 299), sizes) == (200, 200)
    assert best_resolution((90, 290), sizes) == (100, 300)
    assert closest_grid((1000, 1000), 512, 2, 10) == (2, 2)
    assert closest_grid((2000, 2000), 512, 2, 10) == (3, 3)
    assert closest_grid((500, 5000), 512, 2, 10) == (1, 10)


def test_sides_of_idefics() -> None:
    assert longest_side((40, 90), 84) == (38, 84) and longest_side((90, 33), 84) == (84, 30)
    assert longest_side((1, 3000), 84) == (1, 84)
    assert whole_tiles((38, 84), 28) == (56, 84) and whole_tiles((84, 30), 28) == (84, 56)
    assert math.prod(whole_tiles(longest_side((156, 50), 84), 28)) == 84 * 28
