"""What products with weights may be at most off: activations as kernels round them, and comparison with exact sums."""

from __future__ import annotations

import numpy as np

from ikpy._native import core
from ikpy.quants import by_name


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bf16, half to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def round_to_f16(x: np.ndarray) -> np.ndarray:
    """float32 as tile products of halves see it, float64: rounded to f16 times a power of two per row, with which the
    largest magnitude lies between 2^14 and 2^15."""
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(2.0**-112))
    scale = np.exp2(15.0 - np.frexp(largest.astype(np.float64))[1])
    return (x.astype(np.float64) * scale).astype(np.float16).astype(np.float64) / scale


def quantize_activations(x: np.ndarray) -> np.ndarray:
    """x as the int8 kernels see it: per 32 elements scale amax / 127 in bf16, rounded half to even; float64."""
    k = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-k // 32) * 32), np.float32)
    padded[..., :k] = x
    groups = padded.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(groups).max(axis=-1, keepdims=True)
    scale = round_to_bf16(np.where(amax > 1e-35, amax / np.float32(127), np.float32(0)))
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    q = np.rint(groups * inverse).astype(np.float64)
    return (q * scale.astype(np.float64)).reshape(padded.shape)[..., :k]


def effective(x: np.ndarray, type_name: str, n_rows: int = 1) -> np.ndarray:
    """The activations a weight type really multiplies with, float64. n_rows as of activation_format."""
    fmt = core.activation_format(by_name(type_name).id, n_rows)
    if fmt == 1:
        return quantize_activations(x)
    if fmt == 2:
        return round_to_bf16(x).astype(np.float64)
    if fmt == 4:
        return round_to_f16(x)
    return x.astype(np.float64)


def assert_close(actual: np.ndarray, w: np.ndarray, x: np.ndarray, bound: float, what: str) -> None:
    """actual [T, N] against x [T, K] @ w.T [K, N]; the error is measured against sum |w| |x|."""
    expected = x @ w.T
    scale = np.abs(x) @ np.abs(w).T + 1e-30
    error = np.abs(actual - expected) / scale
    token, row = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    assert error[token, row] <= bound, (
        f"{what}: worst at token {token}, row {row}: {actual[token, row]} instead of {expected[token, row]} "
        f"({error[token, row]:.2e} of {scale[token, row]:.3g}, allowed {bound:.1e})"
    )
