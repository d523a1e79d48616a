"""Rows of pictures held to what they should be."""

from __future__ import annotations

import numpy as np


def assert_rows(what: str, found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """Errors relative to the largest value."""
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    errors = np.nan_to_num(np.abs(found - expected), nan=np.inf) / np.abs(expected).max()
    row, element = np.unravel_index(errors.argmax(), errors.shape)
    print(f"{what}: row {row}, element {element}: {errors[row, element]:.1e}")
    assert errors[row, element] <= bound, f"{what}: row {row}, element {element}: {errors[row, element]:.1e}"
