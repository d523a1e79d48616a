"""The choice of blocks of positions against its definition in float64; test_tiers.py runs this file on every tier."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import reference_attention as ref
from ikpy._native import core
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F32, I32, Value
from tests.cpu.kernels.test_sparse_attention import cache_of, run, value_of
from tests.cpu.models import reference_sparse as sparse


class Case:
    """Cells of two sequences in any order, some of them empty, and tokens of both; positions begin at `start`."""

    def __init__(self, rng: np.random.Generator, n: int, n_tokens: int, heads: int, size: int, start: int = 0) -> None:
        self.n, self.size = n, size
        held = rng.permutation(n)[: n - n // 8]
        self.cell_pos, seq = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        for s in range(2):
            self.cell_pos[held[s::2]], seq[held[s::2]] = start + np.arange(len(held[s::2])), s
        self.pos = start + rng.integers(0, len(held[1::2]), n_tokens).astype(np.int32)
        self.pos[0] = start + len(held[1::2]) - 1
        of = rng.integers(0, 2, n_tokens)
        self.visible = (seq == of[:, None]) & (self.cell_pos <= self.pos[:, None])
        self.visible[:, n - 5 :] = False  # not attended to
        self.ranges = np.tile(np.array([0, n - 5], np.int32), (n_tokens, 1))
        self.mask = np.where(self.visible, 0, -np.inf).astype(np.float16)

    def expected(self, q: np.ndarray, keys: np.ndarray, top_k: int, local: int) -> np.ndarray:
        """bool [H, T, cells] for q [T, H, n] and keys [cells, n]."""
        scores = np.einsum("thn,cn->htc", q.astype(np.float64), keys.astype(np.float64))
        chosen, blocks = np.zeros(scores.shape, bool), self.cell_pos // self.size
        for h, t in np.ndindex(scores.shape[:2]):
            seen = np.unique(blocks[self.visible[t]])
            best = np.array([scores[h, t, self.visible[t] & (blocks == b)].max() for b in seen])
            best[seen > self.pos[t] // self.size - local] = np.inf
            kept = seen[np.argsort(-best, kind="stable")[:top_k]]
            chosen[h, t] = self.visible[t] & np.isin(blocks, kept)
        return chosen

    def hold(self, q: np.ndarray, keys: np.ndarray, type_id: int, top_k: int, local: int, n_threads: int) -> None:
        """keys f32 [cells, 1, n]."""
        cache, decoded = cache_of(keys, type_id)
        sources = [value_of(x) for x in (self.mask, self.ranges, self.cell_pos, self.pos)]

        def choice(g: Graph) -> Value:
            mask, ranges, cell_pos, pos = sources
            return g.choose_blocks(
                value_of(q), cache, (mask, ranges), cell_pos, pos, top_k=top_k, size=self.size, local=local
            )

        lists = run(choice, self.n, n_threads, 3)
        expected = self.expected(q, decoded[:, 0], top_k, local)
        blocks = [len(np.unique(self.cell_pos[row] // self.size)) for row in self.visible]
        for h, of_head in enumerate(lists):
            assert ((of_head[:, 0] < 0) == (np.array(blocks) <= top_k)).all(), f"head {h}: {of_head[:, 0]}"
            wrong = np.argwhere(sparse.of_lists(of_head, self.visible) != expected[h])
            assert not len(wrong), f"head {h}: {len(wrong)} wrong, first: token {wrong[0][0]}, cell {wrong[0][1]}"


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(
    ("n", "size", "top_k", "local"), [(300, 4, 7, 1), (515, 128, 2, 1), (70, 1, 20, 3), (300, 16, 4, 0), (40, 3, 40, 2)]
)
@pytest.mark.parametrize(("n_tokens", "heads", "width"), [(1, 4, 128), (9, 3, 32), (40, 1, 40)])
def test_choice(
    n_tokens: int, heads: int, width: int, n: int, size: int, top_k: int, local: int, n_threads: int
) -> None:
    """Of whole numbers, whose products are exact and often equal: the first blocks count then."""
    rng = np.random.default_rng(n + n_tokens)
    case = Case(rng, n, n_tokens, heads, size)
    q = rng.integers(-2, 3, (n_tokens, heads, width)).astype(np.float32)
    case.hold(q, rng.integers(-2, 3, (n, 1, width)).astype(np.float32), ref.F16, top_k, local, n_threads)


@pytest.mark.parametrize("type_id", ref.ALL_TYPES, ids=ref.TYPE_NAMES.get)
def test_types_of_keys(type_id: int) -> None:
    rng = np.random.default_rng(type_id)
    q, keys = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 64), (200, 1, 64)))
    Case(rng, 200, 3, 2, 8).hold(q, keys, type_id, 5, 1, 1)


def test_texts_that_begin_late() -> None:
    """Positions beyond the number of cells, as behind tokens that were removed."""
    rng = np.random.default_rng(7)
    q, keys = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 2, 32), (90, 1, 32)))
    Case(rng, 90, 5, 2, 4, start=1_000_003).hold(q, keys, ref.F32, 3, 1, 2)


def test_scores_that_are_no_numbers() -> None:
    """The first blocks, and the local one."""
    rng = np.random.default_rng(8)
    case = Case(rng, 64, 1, 1, 4)
    sources = [value_of(x) for x in (case.mask, case.ranges, case.cell_pos, case.pos)]
    keys = cache_of(np.full((64, 1, 32), np.nan, np.float32), ref.F32)[0]
    q = np.ones((1, 1, 32), np.float32)
    choice = dict(top_k=3, size=4, local=1)
    lists = run(lambda g: g.choose_blocks(value_of(q), keys, tuple(sources[:2]), *sources[2:], **choice), 64, 1, 3)  # type: ignore[arg-type]
    chosen = np.unique(case.cell_pos[lists[0, 0, 1 : 1 + lists[0, 0, 0]]] // 4)
    assert chosen.tolist() == [0, 1, case.pos[0] // 4]


@pytest.mark.parametrize(("top_k", "local"), [(0, 0), (2, 3)])
def test_sizes_that_do_not_fit(top_k: int, local: int) -> None:
    graph = Graph(core)
    ids = graph.new(3, type_id=I32)
    mask = graph.new(8, 3), graph.new(2, 3, type_id=I32)
    keys = graph.new(32, 1, 8, type_id=F32)
    with pytest.raises(ValueError, match="blocks of 4"):
        cells = graph.new(8, type_id=I32)
        graph.choose_blocks(graph.new(32, 2, 3), keys, mask, cells, ids, top_k=top_k, size=4, local=local)
