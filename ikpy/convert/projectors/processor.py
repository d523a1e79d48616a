"""How a checkpoint has its pictures prepared: preprocessor_config.json, or processor_config.json of transformers 5."""

from __future__ import annotations

import math
from typing import Any

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.errors import FileFormatError

_FILES = {"preprocessor_config.json": "media_proc_cfg", "processor_config.json": "image_processor"}


class Processor(Config):
    """Values of both files; those within the object that each may have come first."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        values: dict[str, Any] = {}
        path = checkpoint.folder / next(iter(_FILES))
        for name, inner in _FILES.items():
            found = checkpoint.json(name)
            path = checkpoint.folder / name if found.get("image_mean") or inner in found else path
            values |= found
            values |= found[inner] if isinstance(found.get(inner), dict) else {}
        values.pop("text_config", None)
        super().__init__(values, path)

    def check(self) -> None:
        """Refuse what no projector file can say."""
        factor = self.number("rescale_factor", default=1 / 255)
        self.require(f"rescale_factor {factor:g}", math.isclose(factor, 1 / 255, rel_tol=1e-4))
        self.require("do_rescale false", self.get("do_rescale", default=True) is not False)

    @property
    def mean(self) -> list[float]:
        """Of the three colours, from 0 to 1."""
        return self._colours("image_mean", 0.0)

    @property
    def std(self) -> list[float]:
        """Divisors of the three colours."""
        values = self._colours("image_std", 1.0)
        self.require(f"image_std {values}", min(values) > 0)
        return values

    def _colours(self, name: str, neutral: float) -> list[float]:
        if self.get("do_normalize", default=True) is False:
            return [neutral] * 3
        if name not in self.values and not self.path.is_file():
            raise FileFormatError(f"{self.path}: no such file; it says how pictures are prepared")
        values = self.get(name)
        fits = isinstance(values, list) and len(values) == 3 and all(_is_number(value) for value in values)
        if not fits:
            raise FileFormatError(f"{self.path}: '{name}' is {values!r}, not three numbers")
        return [float(value) for value in values]

    def pixels(self) -> tuple[int, int]:
        """Least and most pixels of a picture, also where they stand for edges. FileFormatError if there are none."""
        found = []
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            size = self.get("size", default={})
            value = self.get(name, default=size.get(edge) if isinstance(size, dict) else None)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
                raise FileFormatError(f"{self.path}: '{name}' is {value!r}, not a number of pixels")
            found.append(value)
        if found[0] > found[1]:
            raise FileFormatError(f"{self.path}: 'min_pixels' {found[0]} is more than 'max_pixels' {found[1]}")
        return found[0], found[1]

    def edge(self, name: str, *keys: str) -> int | None:
        """A side in pixels of an entry such as {"longest_edge": 512}; None if there is none."""
        value = self.get(name, default=None)
        if isinstance(value, dict):
            value = next((value[key] for key in keys if value.get(key) is not None), None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1 << 16:
            raise FileFormatError(f"{self.path}: '{name}' is {value!r}, not a number of pixels")
        return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
