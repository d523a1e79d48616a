"""Cells that only the last tokens of stretches of positions have."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy._native.inputs import InputArrays
from ikpy.engine.batch import Batch
from ikpy.engine.kv_cache import KVCache, KVCacheFullError
from ikpy.errors import UsageError
from ikpy.graph.ir import F16
from ikpy.models.batch import EVERY, CacheSpec

WINDOW, STRETCH = ("sliding", 16), (EVERY, 4)
N_CTX, N_WINDOW, N_COMPRESSED = 256, 64, 64


def cache(n_compressed: int = N_COMPRESSED) -> KVCache:
    """Of one layer with a window of 16 tokens and stretches of 4 behind it."""
    specs = [CacheSpec("kv", 32, 1, F16, WINDOW), CacheSpec("ke", 32, 1, F16, STRETCH, behind="kv")]
    return KVCache(N_CTX, [specs], can_shift=False, windows={WINDOW: N_WINDOW, STRETCH: n_compressed}, n_sequences=4)


def positions(kv: KVCache, seq_id: int) -> list[int]:
    """Of the compressed cells of a sequence."""
    cells = kv.cells[STRETCH]
    return sorted(cells.pos[cells.matching(seq_id, -1, -1)].tolist())


def add(kv: KVCache, n: int, first: int, seq_id: int = 0) -> None:
    """Places tokens as a context does."""
    for piece in kv.pieces(Batch.single([0] * n, first, seq_id), 8):
        kv.place(piece)


def test_last_tokens_of_stretches_have_cells() -> None:
    kv = cache()
    add(kv, 11, 0)
    add(kv, 6, 0, seq_id=1)
    assert positions(kv, 0) == [3, 7] and positions(kv, 1) == [3]
    add(kv, 1, 11)
    assert positions(kv, 0) == [3, 7, 11]
    kv.seq_rm(0, 7, -1)
    assert positions(kv, 0) == [3] and positions(kv, 1) == [3]
    kv.seq_cp(0, 2, -1, 4)
    assert positions(kv, 2) == [3]


def test_what_graphs_get_to_know() -> None:
    """Tokens that end a stretch, where their cells are, and where the stretches begin; -1 where there are none."""
    kv = cache()
    inputs = InputArrays(8, [cells.stretch for cells in kv.cells.values()], 0)
    batch = Batch.single([5] * 8, 0, 0)
    taken = kv.place(batch)
    inputs.write(batch, taken)
    window, compressed, ends, starts = inputs.arrays[5:9]
    assert window.tolist() == taken[1] and len(set(window.tolist())) == 8
    assert compressed.tolist() == [*taken[2], *[-1] * 6] and len(taken[2]) == 2
    assert ends.tolist() == [3, 7, *[-1] * 6] and starts.tolist() == [0, 4, *[0] * 6]
    mixed = Batch()
    mixed.add([1], 8, 0)
    mixed.add([1, 1, 1, 1, 1], 0, 1)
    taken = kv.place(mixed)
    inputs.write(mixed, taken)
    assert ends.tolist() == [4, *[-1] * 7] and starts[0] == 0
    kv.release(taken)
    assert positions(kv, 1) == [] and positions(kv, 0) == [3, 7]


def test_cells_behind_others_are_one_tensor() -> None:
    kv = cache()
    window, compressed = kv.tensors[0, "kv"], kv.tensors[0, "ke"]
    assert window.buffer is compressed.buffer and compressed.offset == N_WINDOW * window.strides[2]
    assert window.buffer.nbytes == 64 * (N_WINDOW + N_COMPRESSED) == kv.nbytes()
    assert kv.nbytes("ke") == 64 * N_COMPRESSED


def test_sequences_go_on_where_they_end() -> None:
    """A stretch with a gap would be compressed to something else."""
    kv = cache()
    add(kv, 5, 0)
    for first in (4, 6):
        with pytest.raises(UsageError, match="sequence 0 goes on at position 5"):
            add(kv, 1, first)
    with pytest.raises(UsageError, match="sequence 1 goes on at position 0, not at 3"):
        add(kv, 1, 3, seq_id=1)
    kv.seq_rm(0, 3, -1)
    add(kv, 2, 3)
    np.testing.assert_array_equal(positions(kv, 0), [3])


def test_too_few_compressed_cells() -> None:
    """Nothing is taken, and the error says which cells there are too few of."""
    kv = cache(n_compressed=1)
    with pytest.raises(KVCacheFullError, match="compressed stretches of 4 is full"):
        kv.place(Batch.single([0] * 8, 0, 0))
    assert kv.used_cells == 0 and positions(kv, 0) == []
