"""Products of many tokens with rounded sums of activations (kernels/matmul/folded_scales.hpp) against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy._native import tier
from ikpy.quants import by_name
from tests.cpu.kernels.test_matmul import EXACT, activations, dense, random_weight
from tests.expected_products import effective


def offsets_of(data: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers [N, blocks, 16] of Q2_K's offsets and the numbers [N, blocks] that they are multiplied by."""
    blocks = data.reshape(rows, -1, by_name("Q2_K").block_bytes)
    return (blocks[..., :16] >> 4).astype(np.float64), blocks[..., 82:84].copy().view(np.float16)[..., 0].astype(float)


# Share of a unit within which a sum in f32, of up to 32767 units, may lie on either side of a half.
UNSURE = 0.01


def weighted_sums(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of 16 effective activations x [T, K], rounded per 256 columns to 16 bits [T, blocks, 16], and the unit where
    they may be one less or more, as compilers add and multiply in orders of their own.

    In units small enough for the largest, but large enough that 15 times all of them stay below 2^22.
    """
    sums = x.reshape(len(x), -1, 16, 16).sum(axis=-1).astype(np.float32)
    total = np.add.accumulate(np.abs(sums), axis=-1, dtype=np.float32)[..., -1:]
    unit = np.maximum(
        np.abs(sums).max(axis=-1, keepdims=True) / np.float32(32767), total * np.float32(15 / (2**22 - 256))
    )
    inverse = np.divide(np.float32(1), unit, out=np.zeros_like(unit), where=unit > 0)
    units = sums.astype(np.float64) * inverse
    is_unsure = np.abs(units - np.floor(units) - 0.5) < UNSURE
    return np.rint(units) * unit.astype(np.float64), is_unsure * unit.astype(np.float64)


@pytest.mark.skipif(tier not in ("avx512", "avxvnni"), reason="no dot products of bytes")
@pytest.mark.parametrize("shift", (0.0, 3.0))
def test_offsets_meet_rounded_sums(shift: float) -> None:
    """shift: mean of the activations, with which the sum of all magnitudes decides about the unit."""
    k, n = 1024, 96
    data, w = random_weight("Q2_K", k, n, 12)
    integers, factors = offsets_of(data, n)
    for tokens in (32, 67):
        x = activations((tokens, k), tokens) + np.float32(shift)
        q = effective(x, "Q2_K")
        offsets = (integers * factors[..., None]).reshape(n, -1)
        sums, unsure = (values.reshape(tokens, -1) for values in weighted_sums(q))
        rounding = (sums - q.reshape(tokens, -1, 16).sum(axis=-1)) @ offsets.T
        error = np.abs(dense("Q2_K", data, k, n, x, threads=1) - (q @ w.T - rounding)) - unsure @ np.abs(offsets).T
        error /= np.abs(q) @ np.abs(w).T
        assert np.abs(rounding).max() > 0
        token, row = np.unravel_index(error.argmax(), error.shape)
        assert error[token, row] <= EXACT, (
            f"{tokens} tokens: worst at token {token}, row {row}: {error[token, row]:.2e}"
        )
