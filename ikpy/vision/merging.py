"""How many patches of a side become one row."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.models.keys import Keys
from ikpy.vision.params import VisionParams, size


def merge_factor(keys: Keys, params: VisionParams, default: int | None = None) -> int:
    """clip.vision.projector.scale_factor, of which the sides of a picture of image_size must be multiples."""
    factor = size(keys, "projector.scale_factor", default=default)
    if params.grid_size % factor:
        raise FileFormatError(
            f"{keys.gguf.path}: sides of {params.grid_size} patches are no multiple of "
            f"clip.vision.projector.scale_factor {factor}"
        )
    return factor
