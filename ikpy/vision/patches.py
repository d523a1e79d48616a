"""Pictures cut into patches, the rows that encoders read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ikpy.vision.images import Pixels
from ikpy.vision.params import VisionParams


def normalized(image: Pixels, params: VisionParams) -> NDArray[np.float32]:
    """Colours as (x / 255 - mean) / std, float32 [height, width, 3].

    Those of a damaged file may be infinite; rows that come of them are refused.
    """
    with np.errstate(over="ignore"):
        return (image.astype(np.float32) / np.float32(255) - params.mean) / params.std


def cut(image: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Patches of size x size, row by row: [n, 3 size size], colours outside, columns inside, as filters are stored.

    What is left over on the right and below is not looked at.
    """
    rows, columns = image.shape[0] // size, image.shape[1] // size
    grid = image[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    return grid.transpose(0, 2, 4, 1, 3).reshape(rows * columns, 3 * size * size)
