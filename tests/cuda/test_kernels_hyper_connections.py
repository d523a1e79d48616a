"""Emulated CUDA kernels of residual streams and of compressed cache entries, against the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy.backends.cuda import launch
from ikpy.graph.hyper_connections import MAX_STREAMS
from tests.cpu.kernels.test_compress_cells import Cells
from tests.cuda.programs import Program


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize(("n", "iterations"), [(1, 3), (2, 1), (4, 20), (5, 4), (MAX_STREAMS, 6)])
def test_weights(n: int, iterations: int) -> None:
    """Of all ops on streams, and of a sum alone."""
    rng = np.random.default_rng(n)
    p = Program()
    results = []
    for n_weights, parts, magnitude in ((n, 1, 2.0), (2 * n, 2, 1.7), ((2 + n) * n, 3, 2.0)):
        mix = p.array(2 * normal(rng, 3, n_weights + 5)).slice0(4, n_weights)
        base, scale = p.array(normal(rng, n_weights)), p.array(normal(rng, parts))
        results.append(p.graph.hyper_weights(mix, base, scale, n, iterations, 1e-6, magnitude))
    p.compare(*results, bound=2e-6)


@pytest.mark.parametrize(
    ("n", "d", "n_tokens"), [(1, 40, 1), (3, 257, 2), (4, 128, 3), (4, 300, 1), (MAX_STREAMS, 1, 2)]
)
def test_streams(n: int, d: int, n_tokens: int) -> None:
    """Sum and mixture of streams, and of n times the same one; streams that are not mixed."""
    rng = np.random.default_rng(d)
    p = Program()
    y, weights = p.array(normal(rng, n_tokens, d)), p.array(normal(rng, n_tokens, (2 + n) * n))
    same = y.view((d, n, n_tokens), (0, 4 * d, 4 * d * n_tokens))
    results = []
    for streams in (p.array(normal(rng, n_tokens, n, d)), same):
        results += [p.graph.hyper_collapse(streams, weights), p.graph.hyper_expand(streams, y, weights)]
        results += [p.graph.hyper_expand(streams, y, weights.slice0(0, m)) for m in (n, 2 * n)]
    p.compare(*results, bound=1e-6)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("size", "ratio"), [(128, 4), (130, 17), (1, 3), (70, 1), (40, 128)])
def test_compressed_cells(size: int, ratio: int, overlaps: bool) -> None:
    rng = np.random.default_rng(size + ratio)
    w = 2 * size if overlaps else size
    cells = Cells.of(rng, {0: range(3 * ratio), 5: range(ratio // 2, 2 * ratio)}, w, 6 * ratio + 9)
    p = Program()
    values, gates, cell_pos, cell_seq = map(p.array, cells.sources())
    bias = p.array(normal(rng, ratio, w))
    tokens = [(3 * ratio - 1, 0), (2 * ratio - 1, 5), (ratio - 1, 63), (ratio - 1, 64), (ratio - 1, -1), (-1, 0)]
    pos, seq = (p.array(np.array([t[i] for t in tokens], np.int32)) for i in range(2))
    ends = p.array(np.array([1, 0, -1, 2, 3, 4, 5, 6, 2**31 - 1], np.int32))
    entries = p.graph.compress_cells(values, gates, bias, cell_pos, cell_seq, pos, seq, ends, size, ratio)
    assert p.run([entries], on_cuda=False)[0][0, 0, [0, 1, 3]].any(1).all()
    p.compare(entries, bound=1e-6)


def test_entries_of_too_many_cells_stay_on_the_cpu() -> None:
    p = Program()
    cells, bias = p.array(np.zeros((3, 1, 2), np.float32)), p.array(np.zeros((6145, 2), np.float32))
    pos, seq, ids = p.array(np.zeros(3, np.int32)), p.array(np.zeros(3, np.int64)), p.array(np.zeros(1, np.int32))
    p.graph.compress_cells(cells, cells, bias, pos, seq, ids, ids, ids, 1, 6145)
    assert launch.supports(p.graph.nodes[0]) == "entries of 12290 cells have no CUDA kernel (at most 12288)"
