"""Stored words of plain floats."""

from __future__ import annotations

import numpy as np

FLOAT_KINDS = {"F64": "f32", "F32": "f32", "F16": "f16", "BF16": "bf16"}
"""safetensors type -> kind of the numbers."""


def to_float32(raw: np.ndarray, kind: str) -> np.ndarray:
    """Stored words of kind f32, f16 or bf16 as float32."""
    if kind == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)
