"""The selective scan of Mamba-2 against its definition in float64; test_tiers.py runs this file on every tier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cpu.kernels.op_graphs import assert_close
from tests.cpu.kernels.scan_operands import ScanOperands
from tests.cpu.kernels.test_recurrent_ops import mixed_slots, some_kept

RESULT, STATES = ("token", "head", "column"), ("slot", "head", "row", "column")
FEW = 16  # tokens of a sequence that give the bits of one after the other


class Scan(ScanOperands):
    OP = "ssm_scan"
    LANES = ("head", "column")


def make_scan(
    rng: np.random.Generator, n_tokens: int, shape: tuple[int, int, int, int], n_slots: int = 4, *, rate: float = 1.0
) -> Scan:
    """Random operands; x, B and C are parts of the rows of one array. shape: P, H, N, G; rate: of -A."""
    size, heads, rows, groups = shape
    widths = (size * heads, rows * groups, rows * groups)
    values = rng.standard_normal((n_tokens, 3 + sum(widths))).astype(np.float32)
    x, b, c = np.split(values[:, 3:], np.cumsum(widths[:2]), axis=1)
    parts = x.reshape(-1, heads, size), b.reshape(-1, groups, rows), c.reshape(-1, groups, rows)
    dt = rng.exponential(0.5, (n_tokens, heads)).astype(np.float32)
    a = (-rate * rng.uniform(0.1, 2, (heads, 1))).astype(np.float32)
    d = rng.standard_normal((heads, 1)).astype(np.float32)
    state = rng.standard_normal((n_slots, heads, rows, size)).astype(np.float32)
    return Scan(parts[0], dt, a, parts[1], parts[2], d, state, mixed_slots(rng, n_tokens, n_slots))


SHAPES = [
    (64, 4, 128, 2),
    (64, 3, 16, 1),
    (80, 2, 256, 1),
    (33, 6, 20, 3),
    (1, 1, 1, 1),
    (128, 2, 64, 2),
    (7, 8, 17, 2),
]


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan(shape: tuple[int, int, int, int], n_threads: int) -> None:
    """Several sequences in a batch, few and many tokens of each, beyond what is prepared at a time."""
    rng = np.random.default_rng(5)
    for n_tokens in (0, 1, 2, 9, 33, 300):
        scan = make_scan(rng, n_tokens, shape)
        scan.check(f"{n_tokens} tokens", n_threads)
        replace(scan, slots=np.full(n_tokens, 2, np.int32)).check(f"{n_tokens} tokens of one sequence", n_threads)


@pytest.mark.parametrize("n_tokens", [1, 12, 100])
@pytest.mark.parametrize("rate", [0.0, 1e-6, 30.0, 1e4, -0.02])
def test_rates(rate: float, n_tokens: int) -> None:
    """No decay, all at once, and growth."""
    make_scan(np.random.default_rng(6), n_tokens, (40, 2, 64, 1), rate=rate).check(f"A around {-rate}")


def test_results_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(7)
    for n_tokens in (1, 100):
        scan = make_scan(rng, n_tokens, (64, 6, 64, 2))
        found = [scan.run(n) for n in (1, 2, 3, 8)]
        for other in found[1:]:
            for one, another in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, another)


@pytest.mark.parametrize("n_tokens", [FEW, FEW + 1])
def test_few_tokens_give_the_bits_of_one_after_the_other(n_tokens: int) -> None:
    """However many sequences there are; more of them nearly."""
    scan = make_scan(np.random.default_rng(8), 2 * n_tokens, (40, 2, 64, 1))
    scan.slots[:] = np.arange(2 * n_tokens) % 2
    whole, state = scan.run()
    steps = []
    for t in range(len(scan.slots)):
        out, scan.state = scan.tokens(slice(t, t + 1)).run()
        steps.append(out)
    found = np.concatenate(steps)
    if n_tokens == FEW:
        np.testing.assert_array_equal(found, whole)
        np.testing.assert_array_equal(scan.state, state)
    assert_close("one by one", found, whole, RESULT, 2e-6)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("n_tokens", [1, 5, FEW, FEW + 1, 90])
def test_copies_of_states(n_tokens: int, n_threads: int) -> None:
    """Behind some tokens; of few tokens in the bits of a run that ends there, as are results and states."""
    rng = np.random.default_rng(13)
    scan = make_scan(rng, n_tokens, (100, 4, 64, 2))
    if n_tokens > FEW:
        scan.slots[:] = 2
    kept = some_kept(rng, n_tokens)
    copies = np.full((n_tokens, *scan.state.shape[1:]), np.nan, np.float32)
    out, state = scan.run(n_threads, (copies, kept))
    plain, expected = scan.run()
    few = n_tokens <= FEW
    bound = 0.0 if few else 1e-5
    assert_close("results", out, plain, RESULT, bound)
    assert_close("states", state, expected, STATES, bound)
    for t in np.flatnonzero(kept >= 0):
        behind = scan.tokens(slice(0, t + 1)).run()[1] if few else scan.tokens(slice(0, t + 1)).expected()[1]
        assert_close(f"copy behind token {t}", copies[kept[t]], behind[scan.slots[t]], STATES[1:], bound)
    assert np.isnan(copies[[i for i in range(n_tokens) if i not in kept]]).all()


@pytest.mark.parametrize("name", ["x", "dt", "b", "c"])
def test_broken_numbers_of_a_sequence_spoil_no_other(name: str) -> None:
    """NaN and infinity stay in their sequence and are seen there."""
    scan = make_scan(np.random.default_rng(9), 90, (40, 2, 64, 1), n_slots=3)
    scan.slots[:] = np.arange(90) % 3
    good, state = scan.run()
    for bad in (np.nan, np.inf):
        getattr(scan, name)[31] = bad
        found, after = scan.run()
        others = scan.slots != 1
        np.testing.assert_array_equal(found[others], good[others])
        np.testing.assert_array_equal(after[[0, 2]], state[[0, 2]])
        if np.isnan(bad):
            assert np.isnan(found[31]).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    scan = make_scan(np.random.default_rng(10), 3, (8, 4, 8, 2))
    odd = {
        "x": scan.x[:, :3],
        "dt": scan.dt[:, :2],
        "a": scan.a[:2],
        "b": scan.b[:2],
        "c": scan.c[:, :1],
        "d": scan.d.T,
        "state": scan.state[..., :7],
        "slots": scan.slots[:2],
    }
    for name, array in odd.items():
        with pytest.raises(ValueError, match="scan of"):
            replace(scan, **{name: array.copy()}).run()
    for copies, kept in (((2, 4, 7, 8), 3), ((2, 4, 8, 8), 2)):
        with pytest.raises(ValueError, match="kept states"):
            scan.run(copies=(np.zeros(copies, np.float32), np.zeros(kept, np.int32)))
