"""Look-up tables of the quantized formats (quant-formats.md#look-up-tables) as read-only numpy arrays."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import numpy as np

_UNSIGNED_32 = "e8m0_half_f32_bits"


@cache
def _all_tables() -> dict[str, np.ndarray]:
    raw = json.loads(resources.files("ikpy.quants").joinpath("tables.json").read_text(encoding="ascii"))
    arrays = {name: np.array(v, dtype=np.uint32 if name == _UNSIGNED_32 else np.int16) for name, v in raw.items()}
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


def table(name: str) -> np.ndarray:
    """The table of that name, int16 (``e8m0_half_f32_bits``: uint32), shaped as in quant-formats.md#look-up-tables."""
    return _all_tables()[name]
