"""The selective scan of Mamba against its definition in float64; test_tiers.py runs this file on every tier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cpu.kernels.scan_operands import ScanOperands
from tests.cpu.kernels.test_recurrent_ops import mixed_slots, some_kept

SHAPES = [(128, 16), (64, 16), (100, 16), (33, 5), (1, 1), (7, 64), (192, 128)]


class Scan(ScanOperands):
    OP = "channel_scan"
    LANES = ("channel",)


def make_scan(
    rng: np.random.Generator, n_tokens: int, shape: tuple[int, int], n_slots: int = 4, *, rate: float = 1.0
) -> Scan:
    """Random operands; B and C are parts of the rows of one array. shape: P, N; rate: of -A."""
    size, rows = shape
    mixed = rng.standard_normal((n_tokens, 3 + 2 * rows)).astype(np.float32)
    return Scan(
        x=rng.standard_normal((n_tokens, size)).astype(np.float32),
        dt=rng.exponential(0.5, (n_tokens, size)).astype(np.float32),
        a=(-rate * rng.uniform(0.1, 2, (rows, size))).astype(np.float32),
        b=mixed[:, 3 : 3 + rows],
        c=mixed[:, 3 + rows :],
        d=rng.standard_normal(size).astype(np.float32),
        state=rng.standard_normal((n_slots, 1, rows, size)).astype(np.float32),
        slots=mixed_slots(rng, n_tokens, n_slots),
    )


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan(shape: tuple[int, int], n_threads: int) -> None:
    """Several sequences in a batch, few and many tokens of each."""
    rng = np.random.default_rng(5)
    for n_tokens in (0, 1, 2, 9, 70):
        scan = make_scan(rng, n_tokens, shape)
        scan.check(f"{n_tokens} tokens", n_threads)
        replace(scan, slots=np.full(n_tokens, 2, np.int32)).check(f"{n_tokens} tokens of one sequence", n_threads)


@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("rate", [0.0, 1e-6, 30.0, 1e4, -0.02])
def test_rates(rate: float, n_tokens: int) -> None:
    """No decay, all at once, and growth."""
    make_scan(np.random.default_rng(6), n_tokens, (80, 16), rate=rate).check(f"A around {-rate}")


def test_results_depend_on_neither_threads_nor_batches() -> None:
    scan = make_scan(np.random.default_rng(7), 40, (200, 16))
    whole, state = scan.run()
    for n_threads in (2, 3, 8):
        for one, another in zip(scan.run(n_threads), (whole, state), strict=True):
            np.testing.assert_array_equal(one, another)
    steps = []
    for t in range(len(scan.slots)):
        out, scan.state = scan.tokens(slice(t, t + 1)).run()
        steps.append(out)
    np.testing.assert_array_equal(np.concatenate(steps), whole)
    np.testing.assert_array_equal(scan.state, state)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("size", [64, 100])
def test_copies_of_states(size: int, n_threads: int) -> None:
    """Behind some tokens, in the bits of a run that ends there, as are results and states."""
    rng = np.random.default_rng(13)
    scan = make_scan(rng, 30, (size, 16))
    kept = some_kept(rng, 30)
    copies = np.full((30, *scan.state.shape[1:]), np.nan, np.float32)
    out, state = scan.run(n_threads, (copies, kept))
    plain, expected = scan.run()
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_array_equal(state, expected)
    for t in np.flatnonzero(kept >= 0):
        behind = scan.tokens(slice(0, t + 1)).run()[1]
        np.testing.assert_array_equal(copies[kept[t]], behind[scan.slots[t]], err_msg=f"token {t}")
    assert np.isnan(copies[[i for i in range(30) if i not in kept]]).all()


@pytest.mark.parametrize("name", ["x", "dt", "b", "c"])
def test_broken_numbers_of_a_sequence_spoil_no_other(name: str) -> None:
    """NaN and infinity stay in their sequence and are seen there."""
    scan = make_scan(np.random.default_rng(9), 30, (40, 16), n_slots=3)
    scan.slots[:] = np.arange(30) % 3
    good, state = scan.run()
    for bad in (np.nan, np.inf):
        getattr(scan, name)[10] = bad
        found, after = scan.run()
        others = scan.slots != 1
        np.testing.assert_array_equal(found[others], good[others])
        np.testing.assert_array_equal(after[[0, 2]], state[[0, 2]])
        if np.isnan(bad):
            assert np.isnan(found[10]).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    scan = make_scan(np.random.default_rng(10), 3, (8, 4))
    for name, shape in (
        ("dt", (3, 7)),
        ("a", (4, 7)),
        ("b", (2, 4)),
        ("d", (7,)),
        ("state", (2, 1, 4, 7)),
        ("slots", (2,)),
    ):
        kind = np.int32 if name == "slots" else np.float32
        with pytest.raises(ValueError, match="scan of x"):
            replace(scan, **{name: np.zeros(shape, kind)}).run()
