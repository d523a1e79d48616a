"""Activations as products of integers read them, bit for bit (ActQ8Layout in kernels/matmul/activations.hpp)."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.matmul_plans import Program
from ikpy._native import core
from tests.expected_products import round_to_bf16

START_BITS = 0x4B400000
Q8_FORMAT = 1


def fields(row: np.ndarray, n: int) -> dict[str, np.ndarray]:
    """The parts of a prepared row whose columns are padded to n."""
    found, at = {"codes": row[:n].view(np.int8)}, n
    parts = (("scale", 32, np.float32), ("sum32", 32, np.float32), ("start32", 32, np.int32))
    for name, group, dtype in (*parts, ("sum16", 16, np.float32), ("start16", 16, np.int32)):
        found[name] = row[at : at + 4 * n // group].view(dtype)
        at += 4 * n // group
    return found


def reference(x: np.ndarray, n: int) -> dict[str, np.ndarray]:
    """The same in numpy: per 32 columns amax / 127 in bf16, codes rounded half to even.

    Groups with a number that is not finite have codes 0 and the scale NaN, those below 1e-35 the scale 0.
    """
    groups = np.concatenate([x, np.zeros(n - len(x), np.float32)]).reshape(-1, 32)
    amax = np.abs(groups).max(axis=1, keepdims=True)
    finite = np.isfinite(amax)
    counts = finite & (amax > np.float32(1e-35))
    scale = round_to_bf16(np.where(counts, amax / np.float32(127), np.float32(0)))
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=counts)
    codes = np.rint(np.where(finite, groups, np.float32(0)) * inverse).astype(np.int32)
    sum32, sum16 = codes.sum(axis=1), codes.reshape(-1, 16).sum(axis=1)
    return {
        "codes": codes.astype(np.int8).ravel(),
        "scale": np.where(finite, scale, np.float32(np.nan)).ravel(),
        "sum32": sum32.astype(np.float32),
        "start32": (START_BITS - 128 * sum32).astype(np.int32),
        "sum16": sum16.astype(np.float32),
        "start16": (START_BITS - 128 * sum16).astype(np.int32),
    }


def rows_of(kind: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((3, n)).astype(np.float32)
    if kind == "any size":
        return (x * 10.0 ** rng.integers(-38, 38, x.shape)).astype(np.float32)
    if kind == "halves":  # many lie in the middle of two codes
        x = rng.integers(-126, 127, x.shape).astype(np.float32) / 2
        x[:, ::32] = 127
    elif kind == "zeros and tiny":
        x[:, : n // 2] = 0
        x[:, n // 2 :] *= np.float32(1e-37)
    elif kind == "not finite":
        x[0, n // 3], x[1, n - 1], x[2, 0] = np.inf, np.nan, -np.inf
    return x


@pytest.mark.parametrize("kind", ("normal", "any size", "halves", "zeros and tiny", "not finite"))
@pytest.mark.parametrize("n", (32, 100, 256, 320, 512, 1000, 2304))
def test_prepared_rows_are_what_numpy_makes(kind: str, n: int) -> None:
    x, program = rows_of(kind, n), Program()
    program.prepared(x, "Q4_0", len(x))
    program.ops[0]["ip"][0] = Q8_FORMAT
    prepared = program.arrays[0]
    assert core.activation_nbytes(Q8_FORMAT, n, len(x), 1) <= len(prepared)
    program.run()
    stride = core.activation_nbytes(Q8_FORMAT, n, 1, 1)
    padded = -(-n // 256) * 256
    for r in range(len(x)):
        wanted, found = reference(x[r], padded), fields(prepared[r * stride :], padded)
        for name in wanted:
            differ = np.flatnonzero(wanted[name].view(np.uint8) != found[name].view(np.uint8)) // wanted[name].itemsize
            differ = [i for i in differ if not (np.isnan(wanted[name][i]) and np.isnan(found[name][i]))]
            shown = [(int(i), wanted[name][i], found[name][i]) for i in differ[:3]]
            assert not shown, f"{kind}, {n} columns, row {r}, {name}: {shown}"
