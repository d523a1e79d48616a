"""Encoders at the edges: values far beyond every scale, and values that were encoded before."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy._native import core
from ikpy.quants import dequantize, registry
from ikpy.tools.tensor_convert import can_encode

ROWS, COLUMNS = 32, 1024
# Closed forms without a search: what their scales cannot hold is infinite, and refused by `ikpy quantize`.
CLOSED = ("q8_", "q1_0", "iq1_bn", "iq2_bn", "mxfp4")
SEARCHED = [
    row.name
    for row in registry.all_types()
    if row.is_quantized and can_encode(row.name) and not row.name.startswith(CLOSED)
]


def decoded(values: np.ndarray, name: str) -> np.ndarray:
    """Rows float32 [n, ne0] as they are after a type."""
    row, shape = registry.by_name(name), values.shape
    data = np.asarray(core.quantize(np.ascontiguousarray(values), row.id)).reshape(-1)
    return dequantize(data, row.id, shape[::-1]).reshape(shape)


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("size", [1e20, 1e37])
def test_values_beyond_every_scale_are_saturated(name, size):
    values = np.clip(np.random.default_rng(1).standard_normal((ROWS, COLUMNS)), -3, 3)
    stored = decoded((values * size).astype(np.float32), name).astype(np.float64)
    assert np.isfinite(stored).all()
    assert np.corrcoef(values.ravel(), stored.ravel())[0, 1] > 0.6


@pytest.mark.parametrize("name", ["q2_K", "q4_K", "q5_K", "q6_K", "iq6_k"])
def test_values_that_were_encoded_before(name):
    """Files of other quantizations are quantized again; what is added is little, and nothing for most blocks."""
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    once = decoded(values, name)
    twice = decoded(once, name)
    changed = np.any((once != twice).reshape(-1, 256), 1)
    assert changed.mean() < 0.05
    assert np.sqrt(np.mean((twice - once) ** 2) / np.mean((once - values) ** 2)) < 0.05


@pytest.mark.parametrize("name", ["q2_K", "q4_K", "q5_K"])
@pytest.mark.parametrize("outliers", [0, 1], ids=["normal", "outliers"])
def test_scales_and_minimums_are_met(name, outliers):
    """Blocks encoded before are met, also where few levels are used and where the values were F16 in between."""
    rng = np.random.default_rng(7)
    values = rng.standard_t(3, (ROWS, COLUMNS)) if outliers else rng.laplace(size=(ROWS, COLUMNS))
    values = (values * 0.03).astype(np.float32)
    once = decoded(values, name)
    first = np.sqrt(np.mean((once - values) ** 2))
    for source in (once, once.astype(np.float16).astype(np.float32)):
        assert np.sqrt(np.mean((decoded(source, name) - once) ** 2)) < 0.03 * first


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q6_0", "q3_K", "q6_K"])
def test_small_values_of_a_column_of_overwhelming_importance(name):
    """They decide over the scale: at the scale of the largest of the sub-block they would be 0."""
    values = np.random.default_rng(3).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    values[:, 77] = np.where(np.arange(ROWS) % 2, 0.03, -0.02)
    importance = np.ones(COLUMNS, np.float32)
    importance[77] = 1e7
    data = np.asarray(core.quantize(values, registry.by_name(name).id, importance)).reshape(-1)
    stored = dequantize(data, name, (COLUMNS, ROWS)).reshape(ROWS, COLUMNS)
    assert np.abs(stored[:, 77] / values[:, 77] - 1).max() < 0.2


@pytest.mark.parametrize("code", [-128, -121, 127, 116])
def test_grids_of_q6_k_are_met(code):
    """Blocks as other quantizers write them: the largest scale has a code near the end, every part its lowest level."""
    rng = np.random.default_rng(abs(code))
    codes = rng.integers(40, 115, (ROWS, COLUMNS // 16)) * rng.choice([-1, 1], (ROWS, COLUMNS // 16))
    codes[:, ::16] = code
    levels = rng.integers(-32, 32, (ROWS, COLUMNS // 16, 16))
    levels[:, :, 0] = -32
    scales = rng.uniform(1e-4, 1e-2, (ROWS, COLUMNS // 256)).astype(np.float16).astype(np.float32)
    values = np.repeat(scales, 256, 1) * (codes[:, :, None] * levels).reshape(ROWS, COLUMNS).astype(np.float32)
    assert np.array_equal(decoded(values, "q6_K"), values)
