"""Choice of experts by a table, and bounded activations; test_tiers.py runs this file on every tier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ikpy._native import core
from ikpy.graph.builder import Graph
from tests.cpu.kernels.op_graphs import run_graph, value_of
from tests.cpu.models.reference_hyper_connections import sigmoid, softmax

EXPERTS, USED, VOCAB = 37, 5, 29
OPTIONS: dict[str, dict[str, Any]] = {
    "sqrt_softplus": {"normalize": True, "scale": 1.5, "epsilon": 1e-20},
    "softmax": {"normalize": True},
    "sigmoid": {"scale": 2.5},
    "selected_softmax": {},
    "selected_sigmoid": {"normalize": True},
    "sparse_mixer": {},
}


def expected_weights(logits: np.ndarray, ids: np.ndarray, gating: str, options: dict) -> np.ndarray:
    """Weights [T, K] of the experts ids, in float64; 0 of those below 0."""
    if gating == "sparse_mixer":
        return mixed(logits, ids)
    logits = logits.astype(np.float64)
    scores = {
        "sqrt_softplus": lambda x: np.sqrt(np.logaddexp(0, x)),
        "softmax": softmax,
        "sigmoid": sigmoid,
        "selected_softmax": lambda x: x,
        "selected_sigmoid": sigmoid,
    }[gating](logits)
    chosen = np.take_along_axis(scores, np.maximum(ids, 0), 1)
    if gating == "selected_softmax":
        chosen = np.where((ids >= 0).any(1, keepdims=True), softmax(np.where(ids >= 0, chosen, -1e300)), 0)
    chosen = np.where(ids >= 0, chosen, 0)
    if options.get("normalize"):
        total = chosen.sum(1, keepdims=True)
        chosen = np.where(total > 0, chosen / np.maximum(total, 1e-300), 0)
    return chosen * options.get("scale", 1.0)


def mixed(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Shares [T, K] of chosen experts among those that are left and near (arXiv:2409.12136), 0 of those below 0."""
    weights = np.zeros(ids.shape)
    for t, row in enumerate(logits.astype(np.float64)):
        left = row.copy()
        for j, e in enumerate(ids[t]):
            if e < 0:
                continue
            near = (row[e] - left) / np.maximum(np.abs(left), row[e]) <= 0.02
            weights[t, j] = 1 / np.exp(left[near] - row[e]).sum()
            left[e] = np.nan
    return weights


def route(logits: np.ndarray, table: np.ndarray, tokens: np.ndarray, n_threads: int, gating: str, **options: object):
    """Ids and weights [T, K] of the native op."""
    x, rows, picks = (value_of(a) for a in (logits, table, tokens))
    found = run_graph(
        lambda g: g.moe_route(x, table.shape[1], gating=gating, fixed=(rows, picks), **options),  # type: ignore[arg-type]
        n_threads,
    )
    return found[0][0, 0], found[1][0, 0]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("gating", sorted(OPTIONS))
def test_experts_of_a_table(gating: str, n_threads: int) -> None:
    rng = np.random.default_rng(len(gating))
    logits = (2 * rng.standard_normal((11, EXPERTS))).astype(np.float32)
    table = np.stack([rng.permutation(EXPERTS)[:USED] for _ in range(VOCAB)]).astype(np.int32)
    tokens = rng.integers(0, VOCAB, 11).astype(np.int32)
    tokens[:2] = 0, VOCAB - 1
    ids, weights = route(logits, table, tokens, n_threads, gating, **OPTIONS[gating])
    np.testing.assert_array_equal(ids, table[tokens])
    expected = expected_weights(logits, ids, gating, OPTIONS[gating])
    print(f"{gating}: {np.abs(weights / expected - 1).max():.1e}")
    np.testing.assert_allclose(weights, expected, rtol=2e-6)


@pytest.mark.parametrize("groups", [(1, 1), (16, 5)])
def test_the_most_experts(groups: tuple[int, int]) -> None:
    """1024, the best by score and bias, of the groups whose two best sum highest."""
    n_group, n_used = groups
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((7, 1024)).astype(np.float32)
    bias = rng.standard_normal(1024).astype(np.float32)
    x, b = value_of(logits), value_of(bias)
    ids, weights = run_graph(lambda g: g.moe_route(x, USED, gating="sigmoid", bias=b, groups=groups), 2)
    scores = sigmoid(logits.astype(np.float64))
    choice = (scores + bias).reshape(7, n_group, -1)
    left_out = np.argsort(-np.sort(choice, axis=2)[..., -2:].sum(2), axis=1)[:, n_used:]
    np.put_along_axis(choice, left_out[..., None], -np.inf, 1)
    best = np.argsort(-choice.reshape(7, -1), axis=1)[:, :USED]
    np.testing.assert_array_equal(ids[0, 0], best)
    np.testing.assert_allclose(weights[0, 0], np.take_along_axis(scores, best, 1), rtol=2e-6)


@pytest.mark.parametrize("gating", sorted(OPTIONS))
def test_tokens_and_experts_that_there_are_not(gating: str) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, EXPERTS)).astype(np.float32)
    table = rng.integers(0, EXPERTS, (VOCAB, USED)).astype(np.int32)
    table[3], table[4, :2] = -7, (EXPERTS, 2**31 - 1)
    tokens = np.array([-1, VOCAB, 3, 4, 2**31 - 1, -(2**31)], np.int32)
    ids, weights = route(logits, table, tokens, 1, gating, **OPTIONS[gating])
    none = np.full(USED, -1)
    np.testing.assert_array_equal(ids, [none, none, none, [-1, -1, *table[4, 2:]], none, none])
    expected = expected_weights(logits, ids, gating, OPTIONS[gating])
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    assert not weights[[0, 1, 2, 4, 5]].any() and weights[3, 2:].all()


def test_tables_of_another_shape_are_named() -> None:
    graph = Graph(core)
    logits, table = value_of(np.zeros((3, EXPERTS), np.float32)), value_of(np.zeros((VOCAB, USED), np.int32))
    tokens = value_of(np.zeros(3, np.int32))
    for used, rows, picks in ((4, table, tokens), (USED, table, tokens.slice0(0, 2)), (USED, table, logits)):
        with pytest.raises(ValueError, match="experts of tokens"):
            graph.moe_route(logits, used, gating="softmax", fixed=(rows, picks))


def gated(gate: np.ndarray, up: np.ndarray, kind: str, limit: float, n_threads: int) -> np.ndarray:
    """The native op on rows [T, n]."""
    g, u = value_of(gate), value_of(up)
    return run_graph(lambda graph: [graph.gated(g, u, kind, limit)], n_threads)[0][0, 0]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("kind", ["silu", "gelu", "relu", "sigmoid", "relu_squared", "swiglu_oai"])
def test_bounds_before_the_activation(kind: str, n_threads: int) -> None:
    """The same as without a limit from what is within it; NaN stays."""
    rng = np.random.default_rng(1)
    for shape in ((3, 7), (1, 5000), (40, 100)):
        gate, up = ((8 * rng.standard_normal(shape)).astype(np.float32) for _ in range(2))
        gate[0, 0] = np.nan
        up[0, 1] = np.nan
        for limit in (3.0, 10.0):
            low_gate, near_up = np.minimum(gate, np.float32(limit)), np.clip(up, -limit, limit).astype(np.float32)
            found = gated(gate, up, kind, limit, n_threads)
            np.testing.assert_array_equal(found, gated(low_gate, near_up, kind, 0.0, n_threads))
            assert np.isnan(found[0, 1])
            assert kind in ("relu", "relu_squared", "swiglu_oai") or np.isnan(found[0, 0])
    x = np.array([[-30, 5, 50]], np.float32)
    expected = np.array([-30, 5, 10]) * sigmoid(np.array([-30.0, 5, 10])) * [10, -5, -10]
    np.testing.assert_allclose(gated(x, -x, "silu", 10.0, n_threads)[0], expected, rtol=1e-6)
