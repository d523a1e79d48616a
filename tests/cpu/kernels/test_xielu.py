"""The native op of xIELU (arXiv:2411.13010) against float64."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.reference_attention import NativeOp
from ikpy.graph.elementwise import XIELU
from ikpy.graph.ir import F32

PARAMETERS = (0.8, 0.65, 0.5, -0.01)


def xielu(x: np.ndarray, n_threads: int = 1) -> np.ndarray:
    """The native op on rows f32 [T, n]."""
    op = NativeOp("unary")
    out = np.full_like(x, np.nan)
    op.op["dst"], op.op["src"][0, 0] = op.dense(out, F32), op.dense(x, F32)
    op.op["ip"][0, 0], op.op["fp"][0, :4] = XIELU, PARAMETERS
    op.run(n_threads=n_threads)
    return out


def expected(x: np.ndarray) -> np.ndarray:
    positive, negative, beta, eps = np.float32(PARAMETERS).astype(np.float64)
    x = x.astype(np.float64)
    return beta * x + np.where(x > 0, positive * x * x, negative * (np.expm1(np.minimum(x, eps)) - x))


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("n", [1, 33, 2048])
def test_values(n: int, n_threads: int) -> None:
    x = np.concatenate([np.linspace(-90, 40, 6000), np.linspace(-1, 1, 4001), [0.0, -0.0, 1e-30, -1e-30, -1e4, 1e4]])
    x = np.resize(x.astype(np.float32), (len(x) // n + 1, n))
    truth = expected(x)
    error = np.abs(xielu(x, n_threads) - truth) / (np.abs(truth) + 1)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] < 4e-7, f"xielu({x[worst]}) is off by {error[worst]:.2e}"


def test_what_is_no_number() -> None:
    found = xielu(np.array([[np.nan, np.inf, 1.0]], np.float32))[0]
    np.testing.assert_allclose(found, [np.nan, np.inf, 1.3], rtol=1e-6)
