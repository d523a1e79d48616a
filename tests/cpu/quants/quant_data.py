"""Recorded quantized data shared by the tests of tensor types."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "data" / "quants"
GOLDEN_SHAPE = (1024, 16)  # ne0, rows
GOLDEN_TYPES = tuple(json.loads((DATA / "manifest.json").read_text())["types"])


@cache
def format_checks() -> dict[str, Any]:
    """Self-check data of the format description."""
    return json.loads((DATA / "format-checks.json").read_text())


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    """Arrays q_plain, dq_plain, q_imatrix, dq_imatrix (as far as recorded) of a type."""
    with np.load(DATA / f"{name.lower()}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


def golden_variants(name: str) -> list[str]:
    """Of "plain" and "imatrix" those with recorded bytes and values."""
    return [v for v in ("plain", "imatrix") if f"dq_{v}" in golden(name)]


def check_bytes(entry: dict[str, Any], key: str = "data") -> np.ndarray:
    """Bytes of a self-check entry."""
    return np.frombuffer(bytes.fromhex(entry[key]), np.uint8)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, block: int, what: str) -> None:
    """Fail with the worst block unless all floats are equal bit for bit (zeros of either sign are equal)."""
    same = (actual.view(np.uint32) == expected.view(np.uint32)) | ((actual == 0) & (expected == 0))
    if same.all():
        return
    error = np.where(same, 0.0, np.abs(actual.astype(np.float64) - expected) + np.finfo(np.float32).tiny)
    row, column = np.unravel_index(np.nanargmax(error), error.shape)
    first = column - column % block
    raise AssertionError(
        f"{what}: {np.count_nonzero(~same)} of {same.size} values differ; worst in row {row}, elements "
        f"{first}..{first + block - 1}:\nactual   {actual[row, first : first + block]}\n"
        f"expected {expected[row, first : first + block]}"
    )
