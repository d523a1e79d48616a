"""Ops of hyper-connections against their definitions in float64; test_tiers.py runs this file on every tier."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy._native import core
from ikpy.errors import UnsupportedError
from ikpy.graph.builder import Graph
from ikpy.graph.hyper_connections import MAX_STREAMS
from ikpy.graph.ir import Value
from tests.cpu.kernels.op_graphs import assert_close, run_graph, value_of
from tests.cpu.models import reference_hyper_connections as ref

EPS = 1e-6


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def weights(
    mix: np.ndarray,
    base: np.ndarray,
    scale: np.ndarray,
    n: int,
    iterations: int,
    eps: float,
    n_threads: int,
    magnitude: float = 2.0,
) -> np.ndarray:
    """The native op on mix [T, ..]."""
    x, b, s = (value_of(array) for array in (mix, base, scale))
    return run_graph(lambda g: [g.hyper_weights(x, b, s, n, iterations, eps, magnitude)], n_threads)[0][0, 0]


def through(streams: Value, y: np.ndarray, w: np.ndarray, n_threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum [T, D] and mixture [T, n, D] of the native ops."""
    output, weight = value_of(y), value_of(w)
    found = run_graph(lambda g: [g.hyper_collapse(streams, weight), g.hyper_expand(streams, output, weight)], n_threads)
    return found[0][0, 0], found[1][0]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, MAX_STREAMS])
def test_weights(n: int, iterations: int, n_threads: int) -> None:
    rng = np.random.default_rng(n)
    worst = 0.0
    for n_tokens in (1, 2, 15, 16, 17, 40):
        for n_weights, parts, magnitude in ((n, 1, 2.0), (2 * n, 2, 1.7), ((2 + n) * n, 3, 2.0)):
            wide = 3 * normal(rng, n_tokens, n_weights + 5)
            mix, base, scale = wide[:, 2 : 2 + n_weights], normal(rng, n_weights), normal(rng, parts)
            expected = ref.weights(mix, base, scale, n, iterations, EPS, magnitude)
            found = weights(mix, base, scale, n, iterations, EPS, n_threads, magnitude)
            error = np.abs(found - expected) / np.maximum(expected, 1e-3)
            worst = max(worst, float(error.max()))
            assert worst < 4e-6, f"{n_tokens} tokens, {n_weights} weights: {worst:.1e} of a weight"
    print(f"{n} streams, {iterations} iterations: {worst:.1e}")


def test_rows_and_columns_of_the_matrix_sum_to_one() -> None:
    rng = np.random.default_rng(1)
    mix, base, scale = normal(rng, 30, 24), normal(rng, 24), np.ones(3, np.float32)
    matrix = weights(mix, base, scale, 4, 20, EPS, 2)[:, 8:].reshape(-1, 4, 4)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(2), 1, atol=1e-3)


def test_streams_that_are_not_mixed_get_an_epsilon() -> None:
    """Of a weight of their output as of one of the sum."""
    mix, base, scale = np.full((1, 8), -1e4, np.float32), np.zeros(8, np.float32), np.ones(2, np.float32)
    np.testing.assert_allclose(weights(mix, base, scale, 4, 0, 0.25, 1), 0.25, atol=1e-30)


def test_weights_far_from_zero_stay_finite() -> None:
    """A stream takes part or does not; eps keeps a column that none goes to from dividing by zero."""
    mix = np.tile(np.array([[-1e4, 1e4]], np.float32), (3, 4))
    expected = ref.weights(np.clip(mix, -80, 80), np.zeros(8), np.ones(3), 2, 20, EPS)
    found = weights(mix, np.zeros(8, np.float32), np.ones(3, np.float32), 2, 20, EPS, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-30)


def test_what_is_no_number_stays_in_its_token() -> None:
    rng = np.random.default_rng(2)
    mix, base, scale = normal(rng, 20, 24), normal(rng, 24), np.ones(3, np.float32)
    plain = weights(mix, base, scale, 4, 3, EPS, 1)
    mix[7] = np.nan
    found = weights(mix, base, scale, 4, 3, EPS, 1)
    assert np.isnan(found[7]).all()
    np.testing.assert_array_equal(np.delete(found, 7, 0), np.delete(plain, 7, 0))


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize(("n", "d"), [(1, 40), (2, 1), (3, 257), (4, 4096), (4, 1000), (5, 300), (MAX_STREAMS, 515)])
@pytest.mark.parametrize("mixes", [True, False])
def test_streams(n: int, d: int, n_threads: int, mixes: bool) -> None:
    """Sum and mixture; the streams as an array, inside of a wider one, and as n times the same."""
    n_weights = (2 + n) * n if mixes else 2 * n
    rng = np.random.default_rng(d)
    worst = 0.0
    for n_tokens, form in ((1, "whole"), (2, "view"), (5, "same"), (33, "whole"), (1, "same")):
        streams, y, w = normal(rng, n_tokens, n, d), normal(rng, n_tokens, d), normal(rng, n_tokens, n_weights)
        value = value_of(streams)
        if form == "view":
            wide = normal(rng, n_tokens, n, d + 3)
            streams, value = wide[..., 1 : 1 + d], value_of(wide).slice0(1, d)
        elif form == "same":
            one = normal(rng, n_tokens, d)
            streams = np.repeat(one[:, None], n, 1)
            value = value_of(one).view((d, n, n_tokens), (0, 4 * d, 4 * d * n_tokens))
        found = through(value, y, w, n_threads)
        expected = ref.collapse(streams, w)[:, None], ref.expand(streams, y, w)
        for name, out, truth in zip(("sum", "mixture"), (found[0][:, None], found[1]), expected, strict=True):
            assert_close(f"{name}, {n_tokens} tokens, {form}", out, truth, ("token", "stream", "column"), 2e-6)
            worst = max(worst, float(np.abs(out - truth).max() / np.abs(truth).max()))
    print(f"{n} streams of {d}: {worst:.1e}")


def test_weights_of_the_head_are_enough_for_a_sum() -> None:
    rng = np.random.default_rng(3)
    streams, w = normal(rng, 4, 3, 50), normal(rng, 4, 3)
    values = [value_of(x) for x in (streams, w)]
    (found,) = run_graph(lambda g: [g.hyper_collapse(*values)], 1)
    assert_close("sum", found[0, 0], ref.collapse(streams, w), ("token", "column"), 2e-6)


def test_wrong_shapes_are_named() -> None:
    graph = Graph(core)
    rng = np.random.default_rng(4)
    mix, base, scale, streams, y = (
        value_of(normal(rng, *shape)) for shape in ((5, 24), (24,), (3,), (5, 4, 10), (5, 10))
    )
    with pytest.raises(UnsupportedError, match="9 residual streams; at most 8"):
        graph.hyper_weights(mix, base, scale, 9, 20, EPS)
    many, weights_of_many = value_of(normal(rng, 5, 9, 10)), value_of(normal(rng, 5, 99))
    with pytest.raises(UnsupportedError, match="9 residual streams; at most 8"):
        graph.hyper_expand(many, y, weights_of_many)
    with pytest.raises(ValueError, match="weights of 4 streams"):
        graph.hyper_weights(mix, base, scale.slice0(0, 1), 4, 20, EPS)
    with pytest.raises(ValueError, match="weights of 3 streams"):
        graph.hyper_weights(mix, base, scale, 3, 20, EPS)
    with pytest.raises(ValueError, match="mixture of streams"):
        graph.hyper_expand(streams, y.slice0(0, 9), mix)
    with pytest.raises(ValueError, match="mixture of streams"):
        graph.hyper_expand(streams, y, mix.slice0(0, 5))
    with pytest.raises(ValueError, match="sum of streams"):
        graph.hyper_collapse(streams, mix.slice0(0, 3))
