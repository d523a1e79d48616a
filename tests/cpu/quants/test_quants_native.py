"""Native decoders and repacking against the numpy ones, bit for bit, for every type and any row range."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.random_weights import random_tensor
from ikpy._native import core
from ikpy.quants import dequantize, registry
from ikpy.quants.repack import PERMUTATIONS, repack
from tests.cpu.quants.quant_data import assert_same_bits

ROWS, COLUMNS = 32, 1024
# i2_s has one scale for the whole tensor and is decoded as one piece by the numpy decoder.
STORED = [t for t in registry.all_types() if not t.activation_only and t.name != "i2_s"]


def tensor_bytes(row, shape=(COLUMNS, ROWS)):
    """Random data of a tensor: moderate scales for block types, ordinary numbers for plain ones."""
    if row.is_quantized:
        return random_tensor(row, shape, seed=row.id)
    rng = np.random.default_rng(row.id)
    halves = rng.normal(size=shape[0] * shape[1]).astype("<f2").view(np.uint8)
    return (
        halves
        if row.block_bytes == 2 or row.name == "bf16_r16"
        else rng.integers(0, 60, row.tensor_nbytes(shape), dtype=np.uint8)
    )


@pytest.mark.parametrize("row", STORED, ids=lambda t: t.name)
@pytest.mark.parametrize("compute_scale", [False, True], ids=["stored", "compute"])
def test_decoders_agree(row, compute_scale):
    data = tensor_bytes(row)
    expected = dequantize(data, row, (COLUMNS, ROWS), compute_scale=compute_scale)
    actual = core.dequantize(data, row.id, COLUMNS, ROWS, compute_scale)
    assert_same_bits(actual, expected, row.block_elements, row.name)


@pytest.mark.parametrize("name", ["q4_K", "iq4_ks", "q4_k_r4", "iq4_ks_r4", "q8_KV_r8", "bf16_r16", "q8_k_r16"])
def test_first_rows_of_a_group(name):
    """A row count that ends inside a group decodes just those rows."""
    row = registry.by_name(name)
    data = tensor_bytes(row)
    expected = dequantize(data, row, (COLUMNS, ROWS))[:19]
    assert_same_bits(core.dequantize(data, row.id, COLUMNS, 19), expected, row.block_elements, name)


@pytest.mark.parametrize("name", ["q4_K", "iq1_bn", "iq4_ks_r4", "iq3_xxs"])
def test_unaligned_data(name):
    """Blocks may start at any address."""
    row = registry.by_name(name)
    data = tensor_bytes(row)
    shifted = np.zeros(len(data) + 1, np.uint8)
    shifted[1:] = data
    expected = dequantize(data, row, (COLUMNS, ROWS))
    assert_same_bits(core.dequantize(shifted[1:], row.id, COLUMNS, ROWS), expected, row.block_elements, name)


def test_all_f16_numbers():
    bits = np.arange(1 << 16, dtype="<u2")
    actual = core.dequantize(bits.view(np.uint8), registry.by_name("f16").id, 1 << 16, 1)[0]
    expected = bits.view("<f2").astype(np.float32)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("source", "target"), sorted(PERMUTATIONS))
def test_repacking_agrees(source, target):
    a, b = registry.by_name(source), registry.by_name(target)
    data = tensor_bytes(a)
    expected = repack(data, a, b, (COLUMNS, ROWS))
    actual = core.repack(data, a.id, b.id, COLUMNS, ROWS)
    different = np.flatnonzero(actual != expected)
    assert not len(different), f"{source} to {target}: {len(different)} bytes differ, first {different[:8]}"


def test_bad_arguments_are_refused():
    q4_k, q4_k_r4 = registry.by_name("q4_K").id, registry.by_name("q4_k_r4").id
    with pytest.raises(ValueError, match="cannot be dequantized"):
        core.dequantize(np.zeros(64, np.uint8), 4711, 32, 1)
    with pytest.raises(ValueError, match="not possible"):
        core.dequantize(np.zeros(144, np.uint8), q4_k, 255, 1)
    with pytest.raises(ValueError, match="shorter"):
        core.dequantize(np.zeros(143, np.uint8), q4_k, 256, 1)
    with pytest.raises(ValueError, match="shorter"):
        core.dequantize(np.zeros(2 * 144, np.uint8), q4_k_r4, 256, 2)
    with pytest.raises(ValueError, match="cannot be repacked"):
        core.repack(np.zeros(144, np.uint8), q4_k, registry.by_name("q5_k_r4").id, 256, 4)
    with pytest.raises(ValueError, match="multiple of the rows interleaved"):
        core.repack(np.zeros(6 * 144, np.uint8), q4_k, q4_k_r4, 256, 6)
    with pytest.raises(ValueError, match="does not hold"):
        core.repack(np.zeros(143, np.uint8), q4_k, q4_k_r4, 256, 4)
