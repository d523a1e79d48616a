"""Ops of recurrent layers against their definitions in float64; test_tiers.py runs this file on every tier."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy.graph.builder import UNARY_KINDS
from tests.cpu.reference_attention import F32, NativeOp


def softplus(x: np.ndarray, n_threads: int = 1) -> np.ndarray:
    """The native op on rows f32 [T, n]."""
    op = NativeOp("unary")
    out = np.full_like(x, np.nan)
    op.op["dst"], op.op["src"][0, 0] = op.dense(out, F32), op.dense(x, F32)
    op.op["ip"][0, 0] = UNARY_KINDS["softplus"]
    op.run(n_threads=n_threads)
    return out


@pytest.mark.parametrize("n_threads", [1, 3])
def test_softplus(n_threads: int) -> None:
    """Relative to the value itself: far below 0 it is e^x, which a plain ln(1 + e^x) loses."""
    x = np.concatenate([np.linspace(-87, 90, 7001), np.linspace(-2, 2, 4001), [1e-30, -1e-30, 1e30, 3e38, 0.0]])
    x = np.resize(x.astype(np.float32), (5, 2205))
    expected = np.logaddexp(0, x.astype(np.float64))
    error = np.abs(softplus(x, n_threads) - expected) / expected
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] < 6e-7, f"softplus({x[worst]}) is off by {error[worst]:.2e} of itself"


def test_softplus_of_what_is_no_number() -> None:
    x = np.array([[np.inf, -np.inf, np.nan, -1000, 1000]], np.float32)
    np.testing.assert_allclose(softplus(x), [[np.inf, 0, np.nan, 0, 1000]], atol=2e-38)
