"""Ops of sparse attention against their definitions in float64; test_tiers.py runs this file on every tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from benchmarks import reference_attention as ref
from ikpy._native import core
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F16, F32, I32, CellRange, Value, external
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import plan_arena
from ikpy.quants import registry
from tests.cpu.models import reference_sparse as sparse

DTYPES = {F32: np.float32, F16: np.float16, I32: np.int32}
N_CELLS = 300
TOP_K = 70


def value_of(array: np.ndarray) -> Value:
    """A value over a contiguous array, last axis first."""
    type_id = next(t for t, dtype in DTYPES.items() if dtype == array.dtype)
    return external(array.ctypes.data, array, type_id, array.shape[::-1])


def cache_of(rows: np.ndarray, type_id: int) -> tuple[Value, np.ndarray]:
    """A cache [n, heads, n_kv] of rows f32 [cells, heads, n], and what it decodes to."""
    stored, decoded = ref.make_cache(rows, type_id)
    value = external(stored.ctypes.data, stored, type_id, rows.shape[::-1], role="cache")
    value.dynamic_dim = 2
    return value, decoded


def part(cache: Value, start: int, n: int) -> Value:
    """Elements of every row from `start` on."""
    offset = registry.by_id(cache.type_id).row_nbytes(start) if start else 0
    return Value(cache.buffer, cache.type_id, (n, *cache.shape[1:]), cache.strides, offset, 2)


def run(make: Callable[[Graph], Value], n_kv: int, n_threads: int, n_axes: int = 2) -> np.ndarray:
    """The result, its first n_axes axes, last one first, in memory that was all ones."""
    graph = Graph(core)
    value = make(graph)
    arena = plan_arena(graph.nodes, {value.buffer})
    memory = np.full(arena.nbytes + 64, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64
    CompiledPlan(core, graph.nodes, arena, memory.ctypes.data + start).run(n_kv, n_threads)
    dtype = np.dtype(DTYPES[value.type_id])
    found = memory[start + arena.offsets[value.buffer] :][: dtype.itemsize * value.n_elements].view(dtype)
    return found.reshape(value.shape[:n_axes][::-1])


class Batch:
    """Tokens of two sequences whose cells alternate in pieces of 50; `order`: how tokens are mixed."""

    def __init__(self, n_tokens: int, n_cells: int = N_CELLS, *, mixed: bool = True) -> None:
        self.n_cells = n_cells
        cell = np.arange(n_cells)
        cell_seq = np.where(cell // 50 % 2 == 1, 2, 1) if mixed else np.ones(n_cells, int)
        seq = np.arange(n_tokens) // 3 % 2 if mixed else np.zeros(n_tokens, int)
        pos = n_cells - 1 - np.arange(n_tokens)[::-1] * (n_cells // (2 * n_tokens))
        self.visible = ref.visible_cells(cell, cell_seq, pos, seq)
        mask, ranges = ref.kq_mask(cell, cell_seq, pos, seq, n_cells)
        self.mask = value_of(np.ascontiguousarray(mask[:, :n_cells])), value_of(ranges)


# the choice


def choose(
    batch: Batch, q: np.ndarray, weights: np.ndarray, keys: Value, n_threads: int, top_k: int = TOP_K
) -> np.ndarray:
    """bool [T, cells] by the native op."""
    lists = run(
        lambda g: g.choose_cells(value_of(q), value_of(weights), keys, batch.mask, top_k), batch.n_cells, n_threads
    )
    sees_more = batch.visible.sum(1) > top_k
    assert (lists[:, 0] == np.where(sees_more, top_k, -1)).all(), f"numbers of cells {lists[:, 0]}"
    return sparse.of_lists(lists, batch.visible)


@pytest.mark.parametrize("n_threads", [1, 3], ids="{}_threads".format)
@pytest.mark.parametrize(("n_tokens", "heads", "n"), [(1, 64, 128), (5, 3, 32), (40, 20, 64), (70, 1, 160)])
@pytest.mark.parametrize("type_id", [ref.F32, ref.F16, ref.BF16], ids=ref.TYPE_NAMES.get)
def test_choice_is_exact(type_id: int, n_tokens: int, heads: int, n: int, n_threads: int) -> None:
    """Of whole numbers, whose sums are exact and often equal: the first cells count then."""
    rng = np.random.default_rng(n_tokens)
    q, keys = (rng.integers(-1, 2, shape).astype(np.float32) for shape in ((n_tokens, heads, n), (N_CELLS, 1, n)))
    weights = rng.integers(-2, 4, (n_tokens, heads)).astype(np.float32)
    batch = Batch(n_tokens)
    cache, decoded = cache_of(keys, type_id)
    scores = sparse.index_scores(q, weights, decoded[:, 0])
    wanted = sparse.choose(scores, batch.visible, TOP_K)
    found = choose(batch, q, weights, cache, n_threads)
    wrong = np.argwhere(found != wanted)
    assert not len(wrong), f"{len(wrong)} wrong, first: token {wrong[0][0]}, cell {wrong[0][1]}"


@pytest.mark.parametrize("n_threads", [1, 3], ids="{}_threads".format)
@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("type_id", ref.ALL_TYPES, ids=ref.TYPE_NAMES.get)
def test_choice_of_every_type(type_id: int, n_tokens: int, n_threads: int) -> None:
    """No cell left out is better than one chosen by more than the rounding of products."""
    heads, n = 12, 128
    rng = np.random.default_rng(type_id)
    q, keys = (rng.standard_normal(shape).astype(np.float32) for shape in ((n_tokens, heads, n), (N_CELLS, 1, n)))
    weights = rng.standard_normal((n_tokens, heads)).astype(np.float32)
    batch = Batch(n_tokens)
    cache, decoded = cache_of(keys, type_id)
    scores = sparse.index_scores(q, weights, decoded[:, 0])
    found = choose(batch, q, weights, cache, n_threads)
    worst = np.where(found, scores, np.inf).min(1)
    best = np.where(batch.visible & ~found, scores, -np.inf).max(1)
    error = (best - worst) / np.abs(scores).max()
    assert error.max() < 2e-4, f"token {error.argmax()}: a cell left out is better by {error.max():.1e} of the largest"


def test_scores_that_are_no_numbers_or_equal() -> None:
    """Equal scores leave the first cells, negative ones are in order, and nothing else happens with NaN."""
    batch = Batch(1, mixed=False)
    q, weights = np.ones((1, 1, 32), np.float32), np.array([[-1.0]], np.float32)
    keys = np.repeat(np.arange(N_CELLS, dtype=np.float32)[:, None, None] // 4, 32, 2)
    assert np.flatnonzero(choose(batch, q, weights, cache_of(keys, ref.F32)[0], 1)).tolist() == list(range(TOP_K))
    same = cache_of(np.ones_like(keys), ref.F32)[0]
    assert np.flatnonzero(choose(batch, q, weights, same, 1)).tolist() == list(range(TOP_K))
    broken = cache_of(np.full_like(keys, np.nan), ref.F32)[0]
    assert choose(batch, q, weights, broken, 1).sum() == TOP_K


@pytest.mark.parametrize("weight", [-np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("type_id", [ref.F32, ref.F16, ref.BF16], ids=ref.TYPE_NAMES.get)
def test_broken_scores_choose_no_hidden_cells(type_id: int, weight: float) -> None:
    """The first visible cells where every score is -inf or NaN, whose sign bit would order it below -inf."""
    batch, weights = Batch(3), np.full((3, 1), weight, np.float32)
    keys = cache_of(np.ones((N_CELLS, 1, 64), np.float32), type_id)[0]
    found = choose(batch, np.ones((3, 1, 64), np.float32), weights, keys, 2)
    wanted = sparse.choose(np.zeros(found.shape), batch.visible, TOP_K)
    wrong = np.argwhere(found != wanted)
    assert not len(wrong), f"{len(wrong)} wrong, first: token {wrong[0][0]}, cell {wrong[0][1]}"


@pytest.mark.parametrize("n_tokens", [1, 20])
def test_mask_of_chosen_cells(n_tokens: int) -> None:
    batch, rng = Batch(n_tokens), np.random.default_rng(1)
    lists, chosen = random_choice(rng, batch.visible)
    for n_threads in (1, 3):
        found = run(lambda g: g.chosen_mask(batch.mask[0], value_of(lists), N_CELLS), N_CELLS, n_threads)
        assert ((found == 0) == chosen).all() and (found[~chosen] == -np.inf).all()
    few = TOP_K - 1
    found = run(lambda g: g.chosen_mask(batch.mask[0], value_of(np.full_like(lists, 9)), N_CELLS), few, 1)
    assert ((found == 0) == batch.visible)[:, :few].all()


@pytest.mark.parametrize("n_tokens", [1, 20])
def test_chosen_cells_behind_others(n_tokens: int) -> None:
    """Cells before those that are chosen from stay as they are: in a mask, and in front of lists as far as it shows
    them."""
    batch, rng, n_first = Batch(n_tokens), np.random.default_rng(1), 24
    lists, chosen = random_choice(rng, batch.visible)
    shown = rng.random((n_tokens, n_first)) < 0.4
    shown[0] = True
    hidden = np.where(np.concatenate([shown, batch.visible], 1), 0, -np.inf).astype(np.float16)
    mask = value_of(hidden)
    expected = np.concatenate([shown, chosen], 1)
    for n_threads in (1, 3):
        found = run(lambda g: g.chosen_mask(mask, value_of(lists), n_first + N_CELLS, n_first), 32, n_threads)
        assert ((found == 0) == expected).all()
        listed = run(lambda g: g.chosen_list(mask, value_of(lists), n_first, n_first), 32, n_threads)
        for t, row in enumerate(listed):
            every = lists[t, 0] < 0
            assert row[0] == (-1 if every else expected[t].sum())
            assert every or (row[1 : 1 + row[0]] == np.flatnonzero(expected[t])).all()


# attention


def random_choice(rng: np.random.Generator, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lists i32 [T, 1 + TOP_K] and bool [T, cells] of any cells; every third token chooses all."""
    lists, chosen = np.full((len(visible), 1 + TOP_K), -1, np.int32), visible.copy()
    for t, sees in enumerate(visible):
        cells = np.flatnonzero(sees)
        if t % 3 == 2 or len(cells) <= TOP_K:
            continue
        best = np.sort(rng.choice(cells, TOP_K, replace=False))
        lists[t] = [TOP_K, *best]
        chosen[t] = False
        chosen[t, best] = True
    return lists, chosen


# heads, K heads, elements of K and V; V is in K where there is one K head.
SHAPES = {"24x576": (24, 1, 576, 512), "20x96": (20, 1, 96, 64), "3x80": (3, 1, 80, 64), "heads": (6, 6, 48, 32)}


class Case:
    """Attention of a batch to caches of one type: [latents], or where they cannot be divided [rotated, latents]."""

    def __init__(self, shape: str, type_id: int, n_tokens: int, n_cells: int = N_CELLS) -> None:
        heads, kv_heads, dk, dv = SHAPES[shape]
        rng = np.random.default_rng(n_tokens + dk)
        self.batch, self.scale = Batch(n_tokens, n_cells), dk**-0.5
        self.q = rng.standard_normal((n_tokens, heads, dk)).astype(np.float32)
        rows = rng.standard_normal((n_cells, kv_heads, dk)).astype(np.float32)
        if kv_heads > 1:
            (k, self.k), (self.values, self.v) = cache_of(rows, type_id), cache_of(rows[:, :, :dv] + 1, type_id)
            self.keys = [k]
        elif type_id == ref.Q8_KV:
            rotated, latents = (cache_of(np.ascontiguousarray(x), type_id) for x in np.split(rows, [dk - dv], 2))
            self.keys, self.values = [rotated[0], latents[0]], latents[0]
            self.k, self.v = np.concatenate([rotated[1], latents[1]], 2), latents[1]
        else:
            k, self.k = cache_of(rows, type_id)
            self.keys, self.values, self.v = [k], part(k, dk - dv, dv), self.k[:, :, dk - dv :]
        self.group = heads // kv_heads

    def run(self, n_threads: int, *, n_kv: int = 0, **options: object) -> np.ndarray:
        """The native op [T, heads, dv]."""
        values = {"mask": self.batch.mask, "flash": True, **options}
        return run(
            lambda g: g.attention(value_of(self.q), self.keys, self.values, scale=self.scale, **values),  # type: ignore[arg-type]
            n_kv or self.batch.n_cells,
            n_threads,
            3,
        )

    def check(self, found: np.ndarray, visible: np.ndarray, bound: float) -> None:
        k, v = (np.repeat(x, self.group, 1) for x in (self.k, self.v))
        wanted = ref.attend(self.q, k, v, visible, self.scale)
        error = np.abs(found - wanted) / np.abs(wanted).max()
        worst = np.unravel_index(error.argmax(), error.shape)
        assert error[worst] < bound, f"token, head, element {worst}: {found[worst]} instead of {wanted[worst]}"


def bound_of(type_id: int) -> float:
    """Products of quantized caches are those of codes, with queries and weights of 16 bits."""
    return 5e-4 if type_id in ref.CODED else 5e-5


@pytest.mark.parametrize("n_threads", [1, 3], ids="{}_threads".format)
@pytest.mark.parametrize("n_tokens", [1, 2, 20])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("type_id", [ref.F32, ref.F16, ref.BF16, ref.Q8_0, ref.Q8_KV], ids=ref.TYPE_NAMES.get)
def test_attention_to_chosen_cells(type_id: int, shape: str, n_tokens: int, n_threads: int) -> None:
    """By lists and by masks; tokens that choose all are among the others."""
    if shape in ("3x80", "heads") and type_id in (ref.Q8_0, ref.Q8_KV):
        pytest.skip("heads of no whole blocks")
    case = Case(shape, type_id, n_tokens)
    lists, chosen = random_choice(np.random.default_rng(n_threads), case.batch.visible)
    for flash in (True, False):
        case.check(case.run(n_threads, chosen=value_of(lists), flash=flash), chosen, bound_of(type_id))
        hidden = value_of(np.where(chosen, np.float16(0), np.float16(-np.inf)))
        mask, ranges = case.batch.mask
        found = case.run(n_threads, mask=(hidden, ranges), common=mask, flash=flash)
        case.check(found, chosen, bound_of(type_id))


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_changes_where_all_cells_are_chosen(shape: str) -> None:
    """The same bits as without a choice, whether cells are too few or no token has chosen."""
    case = Case(shape, ref.F16, 9)
    all_of_many = np.full((9, 1 + TOP_K), -1, np.int32)
    unset = np.full((9, 1 + TOP_K), 9, np.int32)
    for n_threads in (1, 3):
        for lists, n_kv in ((all_of_many, N_CELLS), (unset, TOP_K)):
            assert (
                case.run(n_threads, n_kv=n_kv, chosen=value_of(lists)).tobytes()
                == case.run(n_threads, n_kv=n_kv).tobytes()
            )


# ops that run for some numbers of cells only


def scaled(g: Graph, x: Value, ranges: Sequence[CellRange]) -> Value:
    """A copy of x, scaled by 2, 3 ... where the number of cells is in the ranges; each op shares its memory."""
    dst = g.copy(x, g.new(*x.shape[:2]))
    for i, cells in enumerate(ranges):
        with g.only(cells):
            g.copy(g.scale(x, 2.0 + i), dst)
    return dst


@pytest.mark.parametrize(("n_kv", "factor"), [(0, 2), (32, 2), (33, 1), (64, 1), (65, 3), (99, 3)])
@pytest.mark.parametrize("n_threads", [1, 3], ids="{}_threads".format)
def test_ops_run_for_their_numbers_of_cells(n_kv: int, factor: int, n_threads: int) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = run(lambda g: scaled(g, value_of(x), [CellRange(upto=32), CellRange(above=64)]), n_kv, n_threads)
    assert (found == factor * x).all()


def test_activations_are_shared_beyond_a_range() -> None:
    """What prepares an input of others runs always; that of an input which is left out does not."""
    g, x, weight = Graph(core), value_of(np.ones((2, 32), np.float32)), value_of(np.ones((4, 32), np.float32))
    with g.only(CellRange(above=5)):
        g.mul_mat(weight, x)
        own = g.scale(x, 2.0)
        g.mul_mat(weight, own)
    g.mul_mat(weight, x)
    assert [(node.kind, node.cells.above) for node in g.nodes] == [
        ("act_prepare", 0),
        ("mul_mat", 5),
        ("scale", 5),
        ("act_prepare", 5),
        ("mul_mat", 5),
        ("mul_mat", 0),
    ]
