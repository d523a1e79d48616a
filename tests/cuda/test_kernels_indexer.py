"""Emulated CUDA kernels of sparse attention: the choice of cells against its definition, the rest against the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.reference_attention import decode_rows
from ikpy.backends.cuda import launch
from ikpy.backends.cuda.launch import indexer as launch_indexer
from ikpy.graph.ir import F32, I32, Value, external
from ikpy.models.blocks import part_of_rows
from tests.cpu.kernels.test_chosen_blocks import Case as Blocks
from tests.cpu.kernels.test_chosen_stretches import Stretches, listed
from tests.cpu.models import reference_sparse as ref
from tests.cuda.programs import Program
from tests.cuda.test_kernels_attention import F16_BOUND, Case


class Choice(Case):
    """Cells of n_cells, of which the last 8 are not attended, that tokens choose by queries of `heads` heads."""

    def __init__(
        self, n_cells: int, n_tokens: int, *, heads: int = 5, n: int = 32, type_name: str = "f16", whole: bool = False
    ) -> None:
        super().__init__(n_cells + heads + n, n_cells, n_tokens, heads, 1)
        if whole:  # so that scores are exact, and many the same
            self.normal = lambda *shape: np.round(self.rng.standard_normal(shape)).astype(np.float32)  # type: ignore[method-assign]
        self.keys = self.cache(n, type_name)
        self.q, self.weights = self.queries(n), self.p.array(self.normal(n_tokens, heads))
        self.seen = self.mask()

    def choose(self, top_k: int) -> Value:
        return self.p.graph.choose_cells(self.q, self.weights, self.keys, self.seen, top_k)

    def expected(self, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Chosen cells, and those that a token sees: bool [T, attended cells]."""
        n_kv = self.n_cells - 8
        rows, mask = self.p.run([self.keys, self.seen[0]], on_cuda=False, n_kv=n_kv)
        keys = decode_rows(rows[0, :n_kv, 0], self.keys.type_id, self.keys.shape[0])
        visible = mask[0, 0, :, :n_kv] == 0
        q, weights = (value.buffer.owner.astype(np.float64) for value in (self.q, self.weights))  # type: ignore[attr-defined]
        return ref.choose(ref.index_scores(q, weights, keys), visible, top_k), visible


def hold(case: Choice, top_k: int) -> None:
    """The device's lists hold the cells of the definition, and their number even where a token sees no more."""
    chosen = case.choose(top_k)
    expected, visible = case.expected(top_k)
    (lists,) = case.p.run([chosen], on_cuda=True, n_kv=case.n_cells - 8)
    assert (lists[0, 0, :, 0] == expected.sum(1)).all()
    found = ref.of_lists(lists[0, 0], visible)
    differ = np.argwhere(found != expected)
    assert not len(differ), (
        f"token {differ[0][0]}: cell {differ[0][1]} {'' if found[tuple(differ[0])] else 'not '}chosen"
    )


@pytest.mark.parametrize("top_k", [1, 16, 40, 500])
@pytest.mark.parametrize("n_tokens", [1, 3, 9])
def test_choice(n_tokens: int, top_k: int) -> None:
    hold(Choice(300, n_tokens), top_k)


@pytest.mark.parametrize(("heads", "n"), [(1, 8), (16, 40), (33, 64), (64, 128)])
def test_sizes(heads: int, n: int) -> None:
    hold(Choice(200, 2, heads=heads, n=n), 20)


@pytest.mark.parametrize("top_k", [16, 100, 400])
def test_equal_scores(top_k: int) -> None:
    """Of the same scores the first cells; more cells than a block of the choice has threads."""
    hold(Choice(1500, 2, whole=True), top_k)


@pytest.mark.parametrize("weight", [-np.inf, np.nan])
def test_broken_scores_choose_no_hidden_cells(weight: float) -> None:
    """The first visible cells where every score is -inf or NaN."""
    case = Choice(300, 2, whole=True)
    chosen, (_, visible) = case.choose(16), case.expected(16)
    case.weights.buffer.owner[:] = weight  # type: ignore[attr-defined]
    (lists,) = case.p.run([chosen], on_cuda=True, n_kv=case.n_cells - 8)
    assert (ref.of_lists(lists[0, 0], visible) == ref.choose(np.zeros(visible.shape), visible, 16)).all()


@pytest.mark.parametrize("type_name", ["bf16", "f32", "q8_0"])
def test_types_of_keys(type_name: str) -> None:
    hold(Choice(160, 2, type_name=type_name, whole=type_name != "q8_0"), 10)


def test_rounds_of_tokens() -> None:
    """More tokens than scores are kept of at once."""
    case = Choice(120, 70)
    hold(case, 12)
    assert len(launch.lower(case.p.graph.nodes[-1], lambda _: 0)) == 4


@pytest.mark.parametrize("top_k", [12, 300])
def test_mask(top_k: int) -> None:
    case = Choice(200, 5)
    chosen = case.choose(top_k)
    case.check(case.p.graph.chosen_mask(case.seen[0], chosen, case.n_cells), 0.0)


@pytest.mark.parametrize("n_tokens", [1, 9])
def test_chosen_cells_behind_others(n_tokens: int) -> None:
    """70 cells that a mask shows some of, and cells chosen among those behind them."""
    n_first, n_cells, top_k = 70, 96, 12
    p, rng = Program(), np.random.default_rng(n_tokens)
    shown = np.where(rng.random((n_tokens, n_first + n_cells)) < 0.4, 0, -np.inf).astype(np.float16)
    cells = np.stack([np.sort(rng.choice(n_cells, top_k, replace=False)) for _ in range(n_tokens)])
    lists = np.concatenate([np.full((n_tokens, 1), top_k), cells], 1).astype(np.int32)
    lists[n_tokens // 2, 0] = -1
    mask, chosen = p.array(shown), p.array(lists)
    both = p.graph.chosen_mask(mask, chosen, n_first + n_cells, n_first), p.graph.chosen_list(mask, chosen, n_first, 40)
    expected, actual = (p.run([*both], on_cuda=on_cuda, n_kv=32) for on_cuda in (False, True))
    assert np.array_equal(expected[0].view(np.uint16), actual[0].view(np.uint16))
    for ours, row in zip(actual[1][0, 0], expected[1][0, 0], strict=True):
        assert ours[0] == row[0] and np.array_equal(ours[1 : 1 + ours[0]], row[1 : 1 + row[0]])


@pytest.mark.parametrize(("n", "ratio", "top_k"), [(300, 4, 7), (2500, 16, 40), (70, 64, 1)])
@pytest.mark.parametrize("n_tokens", [1, 9])
def test_cells_of_chosen_stretches(n_tokens: int, n: int, ratio: int, top_k: int) -> None:
    """More cells than a block has threads; lists that end where they are full."""
    case = Stretches.of(np.random.default_rng(n), n, n_tokens, ratio, top_k, n - 9)
    for _ in range(2):
        p = Program()
        out = listed(p.graph, [p.array(x) for x in case.values()], ratio)
        expected, actual = (p.run([out], on_cuda=on_cuda, n_kv=n - 9)[0][0, 0] for on_cuda in (False, True))
        for t, (ours, row) in enumerate(zip(actual, expected, strict=True)):
            count = row[0]
            assert ours[0] == count and (ours[1 : 1 + count] == row[1 : 1 + count]).all(), f"token {t}"
        case.mask[:], case.cell_pos[:] = 0, ratio - 1


def test_more_stretches_than_a_block_can_hold() -> None:
    p = Program()
    chosen, ends = p.array(np.zeros((1, 3), np.int32)), p.array(np.zeros(400_000, np.int32))
    cells, ids = p.array(np.zeros(8, np.int32)), p.array(np.zeros(1, np.int32))
    seen = p.array(np.zeros((1, 8), np.float16)), p.array(np.zeros((1, 2), np.int32))
    p.graph.stretch_cells(chosen, ends, seen, cells, ids, 2)
    assert "more than 385024 stretches" in (launch.supports(p.graph.nodes[-1]) or "")


def hold_blocks(case: Blocks, q: np.ndarray, keys: np.ndarray, top_k: int, local: int) -> None:
    """Lists of the device for q f32 [T, H, n] and keys f16 [cells, n] against the definition; they hold all cells where
    a token sees no more."""
    p = Program()
    sources = [p.array(x) for x in (case.mask, case.ranges, case.cell_pos, case.pos)]
    cache, (mask, ranges, cell_pos, pos) = p.array(keys[:, None].astype(np.float16)), sources
    choice = dict(top_k=top_k, size=case.size, local=local)
    out = p.graph.choose_blocks(p.array(q), cache, (mask, ranges), cell_pos, pos, **choice)
    (lists,) = p.run([out], on_cuda=True, n_kv=case.n)
    expected = case.expected(q, keys, top_k, local)
    for h, of_head in enumerate(lists[0]):
        assert (of_head[:, 0] == expected[h].sum(1)).all(), f"head {h}: {of_head[:, 0]}"
        wrong = np.argwhere(ref.of_lists(of_head, case.visible) != expected[h])
        assert not len(wrong), f"head {h}: {len(wrong)} wrong, first: token {wrong[0][0]}, cell {wrong[0][1]}"


@pytest.mark.parametrize(
    ("n", "size", "top_k", "local"),
    [(300, 4, 7, 1), (515, 128, 2, 1), (70, 1, 20, 3), (2300, 2, 40, 2), (300, 16, 4, 0), (40, 3, 40, 2)],
)
@pytest.mark.parametrize(("n_tokens", "heads", "width"), [(1, 4, 128), (9, 3, 32), (5, 17, 40)])
def test_choice_of_blocks(n_tokens: int, heads: int, width: int, n: int, size: int, top_k: int, local: int) -> None:
    """Of whole numbers, whose products are often equal; more blocks than a block of the choice has threads."""
    rng = np.random.default_rng(n + n_tokens)
    case = Blocks(rng, n, n_tokens, heads, size)
    q = rng.integers(-2, 3, (n_tokens, heads, width)).astype(np.float32)
    hold_blocks(case, q, rng.integers(-2, 3, (n, width)).astype(np.float32), top_k, local)


def test_blocks_of_real_scores_at_late_positions() -> None:
    rng = np.random.default_rng(3)
    case = Blocks(rng, 200, 5, 2, 4, start=1_000_003)
    q, keys = rng.standard_normal((5, 2, 64)).astype(np.float32), rng.standard_normal((200, 64)).astype(np.float16)
    hold_blocks(case, q, keys.astype(np.float32), 3, 1)


def test_rounds_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than scores are kept of at once."""
    monkeypatch.setattr(launch_indexer, "_BLOCK_SCORES", 1000)
    rng = np.random.default_rng(4)
    case = Blocks(rng, 300, 9, 2, 4)
    q, keys = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((9, 2, 32), (300, 32)))
    hold_blocks(case, q, keys, 7, 1)


def test_blocks_of_scores_that_are_no_numbers() -> None:
    """The first blocks, and the local one."""
    p, case = Program(), Blocks(np.random.default_rng(8), 64, 1, 1, 4)
    mask, ranges, cell_pos, pos = (p.array(x) for x in (case.mask, case.ranges, case.cell_pos, case.pos))
    q, keys = p.array(np.ones((1, 1, 32), np.float32)), p.array(np.full((64, 1, 32), np.nan, np.float16))
    out = p.graph.choose_blocks(q, keys, (mask, ranges), cell_pos, pos, top_k=3, size=4, local=1)
    (lists,) = p.run([out], on_cuda=True, n_kv=64)
    row = lists[0, 0, 0]
    assert np.unique(case.cell_pos[row[1 : 1 + row[0]]] // 4).tolist() == [0, 1, case.pos[0] // 4]


@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("type_name", ["f16", "q8_0", "q6_0"])
def test_attention_to_chosen_latents(type_name: str, n_tokens: int) -> None:
    """Values inside the keys; some tokens see fewer cells than they may choose."""
    for top_k in (24, 300):
        case = Choice(200, n_tokens)
        chosen = case.choose(top_k)
        latents = case.cache(576, type_name)
        q = case.p.array(case.normal(n_tokens, 16, 576))
        values = part_of_rows(latents, 64, 512)
        out = case.p.graph.attention(q, [latents], values, case.seen, scale=0.05, flash=True, chosen=chosen)
        case.check(out, F16_BOUND)


def test_attention_to_chosen_rows_that_lie_apart() -> None:
    """Two segments of keys, values of their own, several heads per cell, and a cache type of odd bytes."""
    case = Choice(120, 2)
    chosen = case.choose(16)
    k, k1, v = case.cache(32, "q5_1", 2), case.cache(32, "f16", 1), case.cache(32, "iq4_nl", 2)
    q = case.p.array(case.normal(2, 6, 64))
    out = case.p.graph.attention(q, [k, k1], v, case.seen, scale=0.1, flash=True, chosen=chosen)
    case.check(out, F16_BOUND)


def test_keys_that_no_kernel_takes() -> None:
    def known(*shape: int, type_id: int = F32) -> Value:
        return external(64, None, type_id, shape)

    graph = Program().graph
    mask = known(40, 3), known(2, 3, type_id=I32)
    graph.choose_cells(known(136, 4, 3), known(4, 3), known(136, 1, 40), mask, 8)
    assert "136 elements" in (launch.supports(graph.nodes[-1]) or "")
