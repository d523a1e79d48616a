"""Single tokens on AVX2 whose scales are words where these are exact (kernels/gemv/gemv_word_scales.hpp), by numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpu.kernels.test_matmul import EXACT, dense, random_weight
from tests.expected_products import assert_close, effective

TYPES = ("Q2_K", "Q3_K", "IQ2_K", "IQ3_K", "Q4_K", "IQ2_KS")
K, N = 2304, 40  # a segment of eight blocks and one more


def spread(tokens: int, binades: int, seed: int) -> np.ndarray:
    """Gaussian activations [T, K] whose groups of 32 are smaller by up to so many binades, some of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, K // 32, 32))
    x *= 2.0 ** -rng.integers(0, binades + 1, (tokens, K // 32, 1))
    x[:, ::7] = 0
    return x.reshape(tokens, K).astype(np.float32)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("binades", (0, 2, 4, 12))
def test_scales_of_any_ratio_are_exact(name: str, binades: int) -> None:
    data, w = random_weight(name, K, N, binades)
    for tokens in (1, 2, 3):
        x = spread(tokens, binades, tokens)
        y = dense(name, data, K, N, x)
        assert_close(y, w, effective(x, name), EXACT, f"{name}, {binades} binades, {tokens} tokens")


@pytest.mark.parametrize("name", TYPES)
def test_blocks_of_both_kinds_in_one_row(name: str) -> None:
    """Of two tokens only one has scales that words cannot hold, in some of its blocks."""
    data, w = random_weight(name, K, N, 1)
    x = np.concatenate((spread(1, 0, 1), spread(1, 0, 2)))
    x[1, 256:288] *= 2.0**-9
    x[1, 2048:2080] *= 2.0**-7
    assert_close(dense(name, data, K, N, x), w, effective(x, name), EXACT, name)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_what_is_not_finite_stays_visible(name: str, value: float) -> None:
    data, _ = random_weight(name, K, N, 1)
    x = spread(2, 0, 3)
    x[1, 700] = value
    y = dense(name, data, K, N, x)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()
