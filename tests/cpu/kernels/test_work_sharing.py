"""Every row of a product is computed once, whatever the number of threads and however late some of them are."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.matmul_plans import Program
from benchmarks.random_weights import random_tensor
from ikpy._native import core
from ikpy.graph.plan import OP_DTYPE, TENSOR_DTYPE
from ikpy.quants import by_name

K, ROWS = 256, (32, 33, 500, 1000)


def chain(n_tokens: int) -> tuple[Program, list[np.ndarray]]:
    """Products of matrices with different numbers of rows, one behind the other, with the same activations."""
    program, results = Program(), []
    x = np.random.default_rng(3).standard_normal((n_tokens, K)).astype(np.float32)
    act, fmt = program.prepared(x, "Q8_0", n_tokens)
    for seed, n in enumerate(ROWS):
        results.append(np.zeros((n_tokens, n), np.float32))
        weight = program.weight(random_tensor(by_name("Q8_0"), (K, n), seed), "Q8_0", (K, n))
        program.op("mul_mat", program.array(results[-1]), [weight, act], {0: fmt, 1: n_tokens})
    return program, results


@pytest.mark.parametrize("n_tokens", [1, 70])
@pytest.mark.parametrize("n_threads", [2, 3, 13, 40])
def test_rows_do_not_depend_on_threads(n_tokens: int, n_threads: int) -> None:
    """More threads than cores: most of them come late, and others take over their rows."""
    program, results = chain(n_tokens)
    program.run(1)
    expected = [r.copy() for r in results]
    plan = core.Plan(np.array(program.tensors, TENSOR_DTYPE), np.array(program.ops, OP_DTYPE), ())
    for turn in range(20):
        for r in results:
            r[:] = np.nan
        plan.run(0, n_threads)
        for n, r, e in zip(ROWS, results, expected, strict=True):
            wrong = np.flatnonzero((r != e).any(axis=0))
            assert not len(wrong), f"turn {turn}: row {wrong[0]} of {n} is {r[:, wrong[0]]}, not {e[:, wrong[0]]}"


def test_threads_change_between_runs() -> None:
    """What is left over of a run with many threads does not disturb one with few."""
    program, results = chain(1)
    program.run(1)
    expected = [r.copy() for r in results]
    plan = core.Plan(np.array(program.tensors, TENSOR_DTYPE), np.array(program.ops, OP_DTYPE), ())
    for n_threads in (7, 2, 1, 5, 5, 2):
        for r in results:
            r[:] = np.nan
        plan.run(0, n_threads)
        for n, r, e in zip(ROWS, results, expected, strict=True):
            np.testing.assert_array_equal(r, e, f"{n} rows, {n_threads} threads")


@pytest.mark.parametrize("n_threads", [2, 7, 8, 9, 16, 17, 64, 65, 100])
def test_ops_wait_for_all_threads(n_threads: int) -> None:
    """Each product reads all of the one before, which groups of threads have computed."""
    program, x = Program(), np.random.default_rng(4).standard_normal((1, K)).astype(np.float32)
    written = []
    for seed in range(12):
        act, fmt = program.prepared(x, "Q8_0")
        weight = program.weight(random_tensor(by_name("Q8_0"), (K, K), seed), "Q8_0", (K, K))
        x = np.zeros((1, K), np.float32)
        program.op("mul_mat", program.array(x), [weight, act], {0: fmt, 1: 1})
        program.op("rms_norm", program.array(x), [program.array(x)])
        written += [program.arrays[act], x]
    program.run(1)
    expected = x.copy()
    assert np.isfinite(expected).all() and np.ptp(expected) > 1
    plan = core.Plan(np.array(program.tensors, TENSOR_DTYPE), np.array(program.ops, OP_DTYPE), ())
    for turn in range(10):
        for data in written:
            data.view(np.uint8)[:] = 0xFF  # not numbers, as far as they are floats
        plan.run(0, n_threads)
        wrong = np.flatnonzero(x[0] != expected[0])
        assert not len(wrong), f"turn {turn}: {len(wrong)} rows, first {wrong[0]}: {x[0, wrong[0]]}"
