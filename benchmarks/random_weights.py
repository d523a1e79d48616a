"""Random weights of every type."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikpy.quants.codec import codec_of
from ikpy.quants.layout import from_numbers


def random_tensor(row: Any, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Random bytes of a tensor, every scale a finite number of moderate size (uint8 [nbytes])."""
    rng = np.random.default_rng(seed)
    codec = codec_of(row.name)
    units, blocks = shape[1] // row.interleave, shape[0] // row.block_elements
    parts = []
    for layout, lead in ((codec.header, (units, 1)), (codec.block, (units, blocks))):
        raw = layout.read(rng.integers(0, 256, (*lead, layout.nbytes), dtype=np.uint8))
        for name in raw.keys() & {"d", "dmin", "m"}:
            raw[name] = _moderate(raw[name], layout.fields[name].kind)
        parts.append(layout.write(raw, lead).reshape(units, -1))
    return np.concatenate(parts, axis=1).reshape(-1)


def _moderate(raw: np.ndarray, kind: str) -> np.ndarray:
    scales = (raw % 2048 / 1024 - 1.0) * 0.01
    return 120 + raw % 8 if kind == "e8m0" else from_numbers(np.asarray(scales, np.float32), kind)
