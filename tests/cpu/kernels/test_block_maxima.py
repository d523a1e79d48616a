"""The largest of every few logits, found while they are computed: the same tokens as from all logits."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from benchmarks.synthetic import write_model
from ikpy import Batch, Context, ContextParams, Model
from ikpy._native import core
from ikpy._native.cells import CellTable
from ikpy._native.draws import BLOCK_LOGITS, Draws
from ikpy._native.inputs import InputArrays
from ikpy._native.steps import Ready, Steps
from ikpy._native.tables import CellTables
from ikpy.engine.graphs import MAXIMA_ROWS
from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F32, external
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import plan_arena

N_VOCAB = 20001


def odd_logits(rng: np.random.Generator, n_rows: int, n: int) -> np.ndarray:
    """float32 [n_rows, n]: normal ones, many ties, few that are not -inf, some that are no numbers."""
    rows = (3 * rng.standard_normal((n_rows, n))).astype(np.float32)
    kind = int(rng.integers(4))
    if kind == 1:
        rows = np.round(rows)
    elif kind == 2:
        rows[rng.random(rows.shape) < 0.99] = -np.inf
    elif kind == 3:
        rows[rng.random(rows.shape) < 0.001] = np.nan
    return rows


def maxima_of(rows: np.ndarray) -> np.ndarray:
    """float32 [n_rows, blocks]."""
    starts = np.arange(0, rows.shape[1], BLOCK_LOGITS)
    return np.maximum.reduceat(rows, starts, axis=1)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_the_op_finds_them(n_threads: int) -> None:
    rng = np.random.default_rng(n_threads)
    for _ in range(40):
        rows = odd_logits(rng, int(rng.integers(1, 5)), int(rng.integers(1, 3000)))
        graph = Graph(core)
        n_rows, n = rows.shape
        value = graph.block_maxima(external(rows.ctypes.data, rows, F32, (n, n_rows)), BLOCK_LOGITS)
        arena = plan_arena(graph.nodes, {value.buffer})
        memory = np.zeros(arena.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        CompiledPlan(core, graph.nodes, arena, memory.ctypes.data + start).run(0, n_threads)
        expected = maxima_of(rows)
        found = memory[start + arena.offsets[value.buffer] :][: expected.nbytes].view(np.float32)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def steps_with(rows: np.ndarray) -> Steps:
    """As after a run with these results."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    never = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p)
    tables = CellTables([CellTable(32)])
    steps = Steps(capsule(never, b"ikpy.run_plan", None), InputArrays(8, [1], 0), tables, 100, 1000, 32, 2)
    steps.put(Ready(len(rows), len(rows), 1, None, (rows,), maxima_of(rows), object()))
    return steps


@pytest.mark.parametrize("seed", range(12))
def test_the_likeliest_is_that_of_all_logits(seed: int) -> None:
    """Of equal ones the first, and the first that is no number."""
    rng = np.random.default_rng(seed)
    rows = odd_logits(rng, 4, int(rng.choice([BLOCK_LOGITS, 1000, 40000])))
    steps = steps_with(rows)
    assert [steps.likeliest(row) for row in rows] == rows.argmax(axis=1).tolist()


def test_other_arrays_are_not_known() -> None:
    rows = odd_logits(np.random.default_rng(0), 4, 1000)
    steps = steps_with(rows)
    flat = rows.reshape(-1)
    for other in (rows[0].copy(), rows[0][:999], flat[1:1001], flat[::2][:1000], rows.view(np.float64)[0], rows):
        assert steps.likeliest(other) == -1 and steps.block_maxima(other) is None
    steps.clear()
    assert steps.likeliest(rows[0]) == -1 and steps.block_maxima(rows[0]) is None


@pytest.mark.parametrize("seed", range(8))
def test_draws_are_those_from_all_logits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        rows = odd_logits(rng, 1, int(rng.choice([100, 3000, 40000])))
        draws = Draws(int(rng.choice([1, 40, 99])), 0.99, 0.01, 0.9)
        unit = float(rng.random())
        token, ids = draws.choose(rows[0], unit), draws.ids.tolist()
        assert draws.choose(rows[0], unit, maxima_of(rows)[0]) == token and draws.ids.tolist() == ids
    with pytest.raises(ValueError, match="too few maxima"):
        draws.choose(rows[0], 0.5, maxima_of(rows)[0][:-1])


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    path: Path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_model("narrow", "q8_0", str(path), layers=1, vocab=N_VOCAB)
    return Context(Model.load(path), ContextParams(n_ctx=512, n_threads=2))


def test_a_context_knows_those_of_its_last_results(context: Context) -> None:
    known = context.known_maxima
    for start, n in enumerate([1, 3, MAXIMA_ROWS, 1]):
        rows = context.decode(Batch.single(range(5, 5 + n), 20 * start, logits="all"), copy=False)
        assert len(rows) == n
        for row, maxima in zip(rows, maxima_of(rows), strict=True):
            np.testing.assert_array_equal(known.block_maxima(row), maxima)
            assert known.likeliest(row) == row.argmax()
            assert known.likeliest(row.copy()) == -1
    rows = context.decode(Batch.single(range(MAXIMA_ROWS + 1), 90, logits="all"), copy=False)
    assert known.block_maxima(rows[0]) is None, "prompts have no need of them"


class Odd:
    """A grammar without even tokens."""

    def allows(self, token: int) -> bool:
        return token % 2 == 1

    def mask(self) -> np.ndarray:
        return np.arange(N_VOCAB) % 2 == 1

    def accept(self, token: int) -> None: ...

    def reset(self) -> None: ...


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": 0.0, "repeat_penalty": 3.0},
        {"temperature": 0.0, "logit_bias": ((7, 100.0),)},
        {"top_k": 3},
        {"top_k": 3, "repeat_penalty": 3.0},
        {"top_k": 3, "logit_bias": ((7, 100.0),)},
        {"top_k": 3, "dry_multiplier": 5.0},
        {"mirostat": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("grammar", [False, True])
def test_samplers_draw_the_same_with_them(context: Context, change: dict, grammar: bool) -> None:
    """Token after token, each of which stands in the history of the next."""
    context.kv.clear()
    params = SamplingParams(seed=4, **change)
    made = [Sampler(params, N_VOCAB, n_ctx=512, grammar=Odd() if grammar else None) for _ in range(2)]
    token = 3
    for position in range(12):
        (row,) = context.decode(Batch.one(token, position), copy=False)
        token = made[0].sample(row, context.known_maxima)
        assert made[1].sample(row) == token
        np.testing.assert_array_equal(made[0].last_ids, made[1].last_ids)
        np.testing.assert_array_equal(made[0].last_probabilities, made[1].last_probabilities)
        for sampler in made:
            sampler.accept(token)
