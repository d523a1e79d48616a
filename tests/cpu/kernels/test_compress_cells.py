"""Compressed cache entries against their definition in float64; test_tiers.py runs this file on every tier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ikpy._native import core
from ikpy.errors import UnsupportedError
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F16, Value
from tests.cpu.kernels.op_graphs import assert_close, run_graph, value_of
from tests.cpu.models import reference_hyper_connections as ref


@dataclass
class Cells:
    """A cache of n cells in any order, some empty; place: the cell of each position and sequence."""

    values: np.ndarray
    gates: np.ndarray
    pos: np.ndarray
    seq: np.ndarray
    place: dict[tuple[int, int], int]

    @classmethod
    def of(cls, rng: np.random.Generator, held: dict[int, range], w: int, n_cells: int) -> Cells:
        """Positions that each sequence holds; every third cell of sequence 0 belongs to sequence 63 too."""
        pos, seq = np.full(n_cells, -1, np.int32), np.zeros(n_cells, np.int64)
        free, place = iter(rng.permutation(n_cells).tolist()), {}
        for s, positions in held.items():
            for p in positions:
                c = place[p, s] = next(free)
                pos[c], seq[c] = p, np.uint64(1 << s).astype(np.int64)
                if s == 0 and p % 3 == 0:
                    seq[c] |= np.uint64(1 << 63).astype(np.int64)
                    place[p, 63] = c
        shape = n_cells, 1, w
        values, gates = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
        return cls(values, 2 * gates, pos, seq, place)

    def sources(self) -> list[np.ndarray]:
        """What the op reads, but for the bias."""
        return [self.values, self.gates, self.pos, self.seq]


def compress(
    cells: Cells, bias: np.ndarray, tokens: list[tuple[int, int]], ends: list[int], size: int, n_threads: int
) -> np.ndarray:
    """The native op for tokens (position, sequence); [E, size]."""
    pos, seq = (np.array([t[i] for t in tokens], np.int32) for i in range(2))
    values, gates, cell_pos, cell_seq = (value_of(x) for x in cells.sources())
    offsets, at, of, last = (value_of(x) for x in (bias, pos, seq, np.array(ends, np.int32)))
    return run_graph(
        lambda g: [g.compress_cells(values, gates, offsets, cell_pos, cell_seq, at, of, last, size, len(bias))],
        n_threads,
    )[0][0, 0]


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("size", "ratio"), [(512, 4), (128, 4), (512, 128), (1, 3), (70, 1), (193, 17)])
def test_entries(size: int, ratio: int, overlaps: bool, n_threads: int) -> None:
    """The first stretch, later ones, one whose beginning is gone, of sequences that share cells, and none at all."""
    rng = np.random.default_rng(size + ratio)
    w = 2 * size if overlaps else size
    held = {0: range(4 * ratio), 5: range(ratio // 2, 3 * ratio)}
    cells = Cells.of(rng, held, w, 8 * ratio + 37)
    bias = rng.standard_normal((ratio, w)).astype(np.float32)
    tokens = [((i + 1) * ratio - 1, s) for s in (0, 5, 63) for i in range(4)] + [
        (ratio - 1, 64),
        (ratio - 1, -1),
        (-1, 0),
    ]
    ends = [3, -1, 0, 1, 2, 4, 5, 6, 8, 9, -1, 7, len(tokens), 12, 13, 14, 10]
    stretches = [tokens[t] if 0 <= t < len(tokens) else None for t in ends]
    expected = ref.compressed(cells.values[:, 0], cells.gates[:, 0], bias, cells.place, stretches, size)
    found = compress(cells, bias, tokens, ends, size, n_threads)
    assert found.shape == expected.shape and not found[[1, 10, 12, 13, 14, 15]].any()
    assert_close("entries", found, expected, ("entry", "element"), 2e-6)
    print(f"{np.abs(found - expected).max() / np.abs(expected).max():.1e}")
    one = compress(cells, bias, tokens, ends[:1], size, n_threads)
    np.testing.assert_array_equal(one, found[:1])


def test_empty_cells_are_no_positions() -> None:
    """Before position 0 there is nothing, though empty cells say -1, whatever sequences they name."""
    rng = np.random.default_rng(0)
    cells = Cells.of(rng, {0: range(4)}, 32, 12)
    cells.seq[cells.pos < 0] = -1
    bias = rng.standard_normal((4, 32)).astype(np.float32)
    expected = ref.compressed(cells.values[:, 0], cells.gates[:, 0], bias, cells.place, [(3, 0)], 16)
    assert_close("first", compress(cells, bias, [(3, 0)], [0], 16, 1), expected, ("entry", "element"), 2e-6)


def test_gates_far_apart() -> None:
    """The largest gate takes all; a bias may decide which."""
    rng = np.random.default_rng(1)
    cells = Cells.of(rng, {0: range(8)}, 20, 9)
    cells.gates *= 1000
    bias = np.zeros((8, 20), np.float32)
    bias[5] = 1e5
    found = compress(cells, bias, [(7, 0)], [0], 20, 1)
    np.testing.assert_array_equal(found[0], cells.values[cells.place[5, 0], 0])


def test_what_is_no_number_is_passed_on() -> None:
    rng = np.random.default_rng(2)
    cells = Cells.of(rng, {0: range(4)}, 20, 5)
    bias = np.zeros((4, 20), np.float32)
    cells.values[cells.place[1, 0], 0, 3] = np.nan
    cells.gates[cells.place[2, 0], 0, 9] = np.nan
    found = compress(cells, bias, [(3, 0)], [0], 20, 1)
    assert np.flatnonzero(np.isnan(found[0])).tolist() == [3, 9]


def test_wrong_shapes_are_named() -> None:
    rng = np.random.default_rng(3)
    cells = Cells.of(rng, {0: range(4)}, 20, 5)
    values, gates, pos, seq = (value_of(x) for x in cells.sources())
    bias, ids = value_of(np.zeros((4, 20), np.float32)), value_of(np.zeros(1, np.int32))
    graph = Graph(core)
    for size, ratio in ((15, 4), (20, 3)):
        with pytest.raises(ValueError, match=f"entries of {size} and {ratio} positions"):
            graph.compress_cells(values, gates, bias, pos, seq, ids, ids, ids, size, ratio)
    halves = Value(values.buffer, F16, values.shape, values.strides, name="gates")
    with pytest.raises(UnsupportedError, match="tensor 'gates' has type f16; it is read as f32 only"):
        graph.compress_cells(values, halves, bias, pos, seq, ids, ids, ids, 20, 4)
