"""The cells of chosen stretches of positions against their definition; test_tiers.py runs this file on every tier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ikpy._native import core
from ikpy.graph.builder import Graph
from ikpy.graph.ir import I32, Value
from tests.cpu.kernels.test_sparse_attention import run, value_of
from tests.cpu.models import reference_sparse as sparse


@dataclass
class Stretches:
    """Cells of two sequences in any order, some of them empty, and stretches of their positions in cells of their own.

    chosen: i32 [T, 1 + top_k] of stretches; expected: bool [T, cells], what tokens attend to.
    """

    mask: np.ndarray
    ranges: np.ndarray
    cell_pos: np.ndarray
    ends: np.ndarray
    chosen: np.ndarray
    pos: np.ndarray
    expected: np.ndarray
    visible: np.ndarray

    @classmethod
    def of(cls, rng: np.random.Generator, n: int, n_tokens: int, ratio: int, top_k: int, n_kv: int) -> Stretches:
        """n cells, of which n_kv are attended to."""
        held = rng.permutation(n)[: n - n // 8]
        cell_pos, cell_seq = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        place = {}
        for seq in range(2):
            for p, c in enumerate(held[seq::2]):
                cell_pos[c], cell_seq[c] = p, seq
        length = len(held[1::2])
        ends = np.full(2 * (length // ratio) + 3, -1, np.int32)
        cells = rng.permutation(len(ends))
        for i in range(2 * (length // ratio)):
            seq, stretch = divmod(i, length // ratio)
            ends[cells[i]] = (stretch + 1) * ratio - 1
            place[seq, stretch] = cells[i]
        pos, seqs = rng.integers(0, length, n_tokens).astype(np.int32), rng.integers(0, 2, n_tokens)
        pos[0] = length - 1
        visible = (cell_pos >= 0) & (cell_seq == seqs[:, None]) & (cell_pos <= pos[:, None])
        visible[:, n_kv:] = False
        chosen = np.zeros((n_tokens, 1 + top_k), np.int32)
        expected = np.zeros((n_tokens, n), bool)
        for t, (p, seq) in enumerate(zip(pos.tolist(), seqs.tolist(), strict=True)):
            whole = (p + 1) // ratio
            taken = np.sort(rng.permutation(whole)[:top_k])
            chosen[t, 0] = len(taken)
            chosen[t, 1 : 1 + len(taken)] = sorted(place[seq, s] for s in taken.tolist())
            in_taken = np.isin(cell_pos // ratio, taken) | (cell_pos >= whole * ratio)
            expected[t] = visible[t] & in_taken
            if t % 5 == 4:
                chosen[t, 0], expected[t] = -1, visible[t]
        ranges = np.tile(np.array([0, n_kv], np.int32), (n_tokens, 1))
        mask = np.where(visible, 0, -np.inf).astype(np.float16)
        return cls(mask, ranges, cell_pos, ends, chosen, pos, expected, visible)

    def values(self) -> list[np.ndarray]:
        """What the op reads, in order."""
        return [self.chosen, self.ends, self.mask, self.ranges, self.cell_pos, self.pos]


def listed(graph: Graph, values: list[Value], ratio: int) -> Value:
    chosen, ends, mask, ranges, cell_pos, pos = values
    return graph.stretch_cells(chosen, ends, (mask, ranges), cell_pos, pos, ratio)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(("n", "ratio", "top_k"), [(300, 4, 7), (300, 1, 30), (517, 16, 5), (70, 64, 1), (40, 3, 40)])
@pytest.mark.parametrize("n_tokens", [1, 9])
def test_cells(n_tokens: int, n: int, ratio: int, top_k: int, n_threads: int) -> None:
    """Some tokens see fewer stretches than they may choose, none or all; the last cells are not attended to."""
    case = Stretches.of(np.random.default_rng(n + ratio), n, n_tokens, ratio, top_k, n - 5)
    lists = run(lambda g: listed(g, [value_of(x) for x in case.values()], ratio), n - 5, n_threads)
    assert (lists[:, 0] == np.where(case.chosen[:, 0] < 0, -1, case.expected.sum(1))).all()
    wrong = np.argwhere(sparse.of_lists(lists, case.visible) != case.expected)
    assert not len(wrong), f"{len(wrong)} wrong, first: token {wrong[0][0]}, cell {wrong[0][1]}"


def test_lists_end_where_they_are_full() -> None:
    """Cells that share a position, as no cache has them, and stretches of positions far beyond all others."""
    case = Stretches.of(np.random.default_rng(3), 90, 4, 4, 3, 90)
    case.cell_pos[:] = 3
    case.mask[:] = 0
    case.ends[:] = 3
    values = [value_of(x) for x in case.values()]
    lists = run(lambda g: listed(g, values, 4), 90, 1)
    assert lists[0].tolist() == [15, *range(15)]
    case.ends[:] = 2**31 - 1
    assert run(lambda g: listed(g, values, 4), 90, 1)[0, 0] == 0


def test_shapes_that_do_not_fit() -> None:
    graph = Graph(core)
    chosen, ends, pos = graph.new(4, 3, type_id=I32), graph.new(9, type_id=I32), graph.new(2, type_id=I32)
    mask = graph.new(8, 3), graph.new(2, 3, type_id=I32)
    with pytest.raises(ValueError, match="stretches of 4"):
        graph.stretch_cells(chosen, ends, mask, graph.new(8, type_id=I32), pos, 4)
