"""Projector files of random encoders: metadata and tensors as they are stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ikpy._native import core
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.ir import F16, F32
from ikpy.quants import registry
from tests.cpu.models.reference_models import VALUE_TYPES

Weights = dict[str, np.ndarray]
Stored = tuple[int, np.ndarray]
"""Number of a type, and the data of a tensor in it."""


class Encoder(Protocol):
    """Sizes that encoders of every kind have."""

    @property
    def d(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def ff(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def text(self) -> int: ...
    @property
    def eps(self) -> float: ...


def sizes(encoder: Encoder) -> dict[str, Any]:
    """Keys of the sizes, without the prefix of the kind."""
    return {
        "embedding_length": encoder.d,
        "attention.head_count": encoder.heads,
        "feed_forward_length": encoder.ff,
        "block_count": encoder.layers,
        "projection_dim": encoder.text,
        "attention.layer_norm_epsilon": encoder.eps,
    }


def write_tensors(
    path: Path, keys: Mapping[str, Any], weights: Weights, stored: Mapping[str, Stored], signed: Collection[str] = ()
) -> Path:
    """A file of metadata and of weights as they are stored. signed: keys of integers with a sign; arrays have one."""
    with GGUFWriter(path) as out:
        for key, value in keys.items():
            is_array = isinstance(value, list)
            of = type(value[0] if is_array else value)
            kind = GGUFValueType.INT32 if of is int and (is_array or key in signed) else VALUE_TYPES[of]
            if is_array:
                out.add_array(key, kind, value)
            else:
                out.add(key, kind, value)
        for name, (type_id, _) in stored.items():
            out.add_tensor(name, weights[name].shape[::-1], type_id)
        for name, (_, data) in stored.items():
            out.write(name, data)
    return path


def write_in_type(path: Path, keys: Mapping[str, Any], weights: Weights, type_name: str = "f32") -> Path:
    """A file with matrices in a type; the weights become what that type holds."""
    stored: dict[str, Stored] = {name: (F16 if w.dtype == np.float16 else F32, w) for name, w in weights.items()}
    for name in [name for name, w in weights.items() if type_name != "f32" and w.ndim == 2]:
        stored[name], weights[name] = in_type(weights[name], type_name)
    return write_tensors(path, keys, weights, stored)


def in_type(w: np.ndarray, type_name: str) -> tuple[Stored, np.ndarray]:
    """A matrix stored in a type, and what that holds."""
    kind = registry.by_name(type_name)
    if w.shape[1] % kind.block_elements:
        return (F32, w), w
    data = core.quantize(w, kind.id, None, 1)
    return (kind.id, data), core.dequantize(data.reshape(-1), kind.id, w.shape[1], len(w), True).reshape(w.shape)
