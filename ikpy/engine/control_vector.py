"""Control vectors: directions added to the residual stream behind layers (GGUF files with tensors direction.N)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import dequantize

DIRECTION = re.compile(r"direction\.(\d{1,9})")
FIRST_LAYER = 1
"""direction.N belongs behind layer N counted from 0; layer 0 has none."""


NO_DIRECTION = "the file holds no control vector (no tensors named direction.N)"


def load_control_vector(path: str | os.PathLike[str], n_layer: int, n_embd: int) -> NDArray[np.float32]:
    """Directions float32 [n_layer, n_embd]; rows of layers without one are 0.

    Raises FileFormatError for a file without directions, of another embedding size or with NaN or infinity.
    """
    rows = np.zeros((n_layer, n_embd), np.float32)
    with GGUFFile.open(Path(path)) as gguf:
        found = False
        for name, info in gguf.tensors.items():
            match = DIRECTION.fullmatch(name)
            if match is None:
                continue
            layer = int(match[1])
            if layer < FIRST_LAYER:
                raise FileFormatError(f"{path}: '{name}': directions are numbered from {FIRST_LAYER}")
            if info.element_count != n_embd:
                raise FileFormatError(f"{path}: '{name}' has {info.element_count} elements, the model {n_embd}")
            found = True
            if layer < n_layer:
                rows[layer] = dequantize(gguf.data(info), info.type_id, info.shape).reshape(-1)
                if not np.isfinite(rows[layer]).all():
                    raise FileFormatError(f"{path}: '{name}' has elements that are not finite numbers")
        if not found:
            raise FileFormatError(f"{path}: {NO_DIRECTION}")
    return rows


def check_control_vector_file(path: str | os.PathLike[str]) -> None:
    """Raises FileFormatError unless the header names directions, of whatever model."""
    with GGUFFile.open(Path(path), header_only=True) as gguf:
        if not any(DIRECTION.fullmatch(name) for name in gguf.tensors):
            raise FileFormatError(f"{path}: {NO_DIRECTION}")


def in_range(rows: NDArray[np.float32], first: int, last: int) -> NDArray[np.float32]:
    """The rows of layers first to last, both included; the others are 0. 0 or less: the first, the last layer."""
    kept = np.zeros_like(rows)
    first = first if first > 0 else FIRST_LAYER
    last = last if last > 0 else len(rows)
    kept[first : last + 1] = rows[first : last + 1]
    return kept
