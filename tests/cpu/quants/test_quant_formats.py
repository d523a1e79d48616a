"""docs/quant-formats.md describes every tensor type, and its formulas decode what the numpy decoders decode."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.random_weights import random_tensor
from ikpy.quants import dequantize, registry
from tests.cpu.quants.quant_format_page import PAGE, TYPES, PageField, decode

STORED = [row for row in registry.all_types() if not row.activation_only]
BLOCKS = [row for row in STORED if row.block_elements > 1 and row.name != "i2_s"]


def test_every_type_is_described():
    assert {row.name for row in BLOCKS} == TYPES.keys()
    numbers = PAGE.read_text().partition("\n## Numbers\n")[2].partition("\n## ")[0]
    assert all(f"`{row.name}`" in numbers for row in STORED if row.block_elements == 1)


def assert_contiguous(fields: list[PageField], nbytes: int) -> None:
    """Fields follow each other from 0 to the end."""
    at = 0
    for each in fields:
        assert each.offset == at, each
        at += each.nbytes
    assert at == nbytes


@pytest.mark.parametrize("row", BLOCKS, ids=lambda row: row.name)
def test_layout_fills_block_and_header(row):
    assert_contiguous(TYPES[row.name].block, row.block_bytes * row.interleave)
    assert_contiguous(TYPES[row.name].header, row.row_extra_bytes * row.interleave)


@pytest.mark.parametrize("row", BLOCKS, ids=lambda row: row.name)
def test_formulas_decode(row):
    shape = (2 * row.block_elements, 2 * row.interleave)
    data = random_tensor(row, shape, seed=row.id)
    expected = dequantize(data, row, shape)
    actual = decode(row.name, data.reshape(-1), shape)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-7 * np.abs(expected).max())
