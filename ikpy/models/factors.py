"""Factors of matrices: a tensor X.scale holds what the numbers of X.weight are multiplied by (quant-formats.md).

Files with NVFP4 have them, one for a matrix or one for every expert. X.input_scale, of activations, is not used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.graph.ir import F32, Value, external

_WEIGHT, _FACTOR, _ACTIVATIONS = ".weight", ".scale", ".input_scale"


def activation_scale(info: TensorInfo) -> str:
    """Name of the scale of a matrix's activations."""
    return info.name.removesuffix(_WEIGHT) + _ACTIVATIONS


def companions(name: str) -> tuple[str, ...]:
    """Names of what may lie beside a matrix X.weight: its factors and the scale of its activations."""
    return tuple(name.removesuffix(_WEIGHT) + end for end in (_FACTOR, _ACTIVATIONS)) if name.endswith(_WEIGHT) else ()


def find_factor(gguf: GGUFFile, info: TensorInfo) -> TensorInfo | None:
    """The tensor with the factor of a matrix [K, N], or those of the matrices of [K, N, E]; None if there is none.

    Tensors of that name with another number of elements, or of another type, belong to architectures.
    """
    if not info.name.endswith(_WEIGHT):
        return None
    scale = gguf.tensors.get(info.name.removesuffix(_WEIGHT) + _FACTOR)
    n_matrices = info.shape[2] if len(info.shape) > 2 else 1
    is_factor = scale is not None and scale.type_id == F32 and scale.element_count in (1, n_matrices)
    return scale if is_factor else None


def factor_values(gguf: GGUFFile, scale: TensorInfo) -> np.ndarray:
    """The factors f32; FileFormatError unless all are finite."""
    values = gguf.data(scale).view(np.float32)
    broken = values[~np.isfinite(values)]
    if len(broken):
        raise FileFormatError(f"{gguf.path}: tensor '{scale.name}' is {broken[0]:g}; factors of matrices are finite")
    return values


def multiplied(numbers: np.ndarray, factors: np.ndarray | float) -> np.ndarray:
    """Matrices f32 [.., N, K] times one factor, or times those of [E, N, K]."""
    return numbers * np.asarray(factors, np.float32).reshape(-1, *[1] * (numbers.ndim - 1))


def joined_factors(parts: Sequence[Value]) -> Value | None:
    """Factors [1, E] of matrices that become one tensor [K, N, E], None if none has one."""
    factors = [part.buffer.factor for part in parts]
    if all(factor is None for factor in factors):
        return None
    values = np.array([1.0 if factor is None else factor for factor in factors], np.float32)
    return external(values.ctypes.data, values, F32, (1, len(parts)))
