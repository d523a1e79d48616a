"""Launches of sparse attention's own ops: the choice of cells, masks and lists of it, and copies of chosen rows."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ikpy.backends.cuda.launch.base import (
    WORK,
    Launch,
    OpContext,
    ceil_div,
    i32,
    i64,
    lowers,
    packed_view,
    pointer,
    view,
)
from ikpy.backends.cuda.launch.limits import DEFAULT_SHARED_BYTES, STATIC_SHARED_BYTES
from ikpy.graph.ir import Node, Value
from ikpy.quants import registry

# Cells and tokens of a block of index_scores, elements of a key (kernels/indexer.cu).
_CELLS, _TOKENS, _MAX_SIZE = 128, 4, 128
# Tokens whose scores are kept at once: 33 MB for 128 k cells.
_ROUND = 64
# Scores of blocks that are kept at once: 32 MB.
_BLOCK_SCORES = 8 << 20
_CHOICE_THREADS, _CLEAR_THREADS = 1024, 256
_ROW_ALIGNMENT = 16
_GATHER_WARPS = 4


def _keys(op: Node) -> Value:
    """Index keys [n, 1, cells] that a choice goes by."""
    keys = op.src[1 if op.kind == "choose_blocks" else 2]
    assert keys is not None
    return keys


def unsupported(op: Node) -> str | None:
    """Why cells cannot be chosen on a device, or None."""
    keys = _keys(op)
    if keys.type_name not in registry.CACHE_TYPES:
        return f"cache type {keys.type_name} has no CUDA kernel"
    size = keys.shape[0]
    return f"index keys of {size} elements (at most {_MAX_SIZE}, by eights)" if size > _MAX_SIZE or size % 8 else None


def work_bytes(op: Node) -> int:
    """Bytes of the scores of a round of tokens."""
    if op.kind == "choose_blocks":
        return _BlockRounds.of(op).nbytes
    return 4 * _score_stride(op) * min(op.dst.shape[1], _ROUND)


def _indexer(c: OpContext, mask: int) -> bytes:
    """ikpy::cuda::Indexer of a choice by queries and `_keys` whose mask is this source, its ranges the next."""
    keys = _keys(c.op)
    views = c.view(0) + view(keys, c.address)
    return (
        views
        + c.at(mask)
        + c.at(mask + 1)
        + c.runtime
        + struct.pack("<q2i", c.source(mask).strides[1], keys.type_id, 0)
    )


# cells


def _score_stride(op: Node) -> int:
    """Floats from one token's scores to the next one's."""
    return ceil_div(_keys(op).shape[2], 64) * 64


@lowers("choose_cells")
def _choose_cells(c: OpContext) -> list[Launch]:
    keys = _keys(c.op)
    n_tokens, top_k, n_cells = c.op.dst.shape[1], c.op.dst.shape[0] - 1, keys.shape[2]
    indexer, weights = _indexer(c, 3), c.view(1)
    scores, stride = pointer(c.address(WORK)), i64(_score_stride(c.op))
    launches = []
    for first in range(0, n_tokens, _ROUND):
        n = min(_ROUND, n_tokens - first)
        grid = (ceil_div(n_cells, _CELLS), ceil_div(n, _TOKENS), 1)
        args = [scores, stride, indexer, weights, i32(top_k), i32(first), i32(n)]
        launches.append(Launch("index_scores", grid, (128, 1, 1), 0, args))
        n_kv = c.runtime if keys.dynamic_dim == 2 else pointer(0)
        args = [c.dst, scores, stride, c.at(4), i32(first), i32(n_cells), n_kv]
        launches.append(Launch("choose_cells", (n, 1, 1), (_CHOICE_THREADS, 1, 1), 0, args))
    return launches


# blocks of positions


@dataclass(frozen=True)
class _BlockRounds:
    """How many blocks a token may see, and of how many tokens their scores are kept at once."""

    n_blocks: int
    n_heads: int
    n_tokens: int

    @classmethod
    def of(cls, op: Node) -> _BlockRounds:
        q, mask = op.src[0], op.src[2]
        assert q is not None and mask is not None
        n_blocks = mask.shape[0] // op.ip[0] + 2
        most = max(1, _BLOCK_SCORES // (n_blocks * q.shape[1]))
        return cls(n_blocks, q.shape[1], min(q.shape[2], most))

    @property
    def n_scores(self) -> int:
        return self.n_tokens * self.n_heads * self.n_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the scores of a round, and of a bit for every block."""
        return 4 * (self.n_scores + self.n_tokens * self.n_heads * ceil_div(self.n_blocks, 32))


@lowers("choose_blocks")
def _choose_blocks(c: OpContext) -> list[Launch]:
    rounds, work, indexer = _BlockRounds.of(c.op), c.address(WORK), _indexer(c, 2)
    n_tokens, n_cells, (size, local) = c.source(0).shape[2], _keys(c.op).shape[2], c.op.ip
    positions = c.at(4) + c.at(5) + struct.pack("<2i", size, rounds.n_blocks)
    best, sets = pointer(work), pointer(work + 4 * rounds.n_scores)
    launches = []
    for first in range(0, n_tokens, rounds.n_tokens):
        n = min(rounds.n_tokens, n_tokens - first)
        clear = (ceil_div(rounds.n_scores, _CLEAR_THREADS), 1, 1)
        launches.append(Launch("clear_blocks", clear, (_CLEAR_THREADS, 1, 1), 0, [best, i64(rounds.n_scores)]))
        grid = (ceil_div(n_cells, _CELLS), ceil_div(n, _TOKENS), 1)
        launches.append(Launch("block_scores", grid, (128, 1, 1), 0, [best, indexer, positions, i32(first), i32(n)]))
        args = [c.dst, best, sets, c.view(2), c.at(3), positions, i32(local), i32(first), c.runtime]
        grid = (n, rounds.n_heads, 1)
        launches.append(Launch("choose_blocks", grid, (_CHOICE_THREADS, 1, 1), 0, args))
    return launches


# what was chosen


@lowers("chosen_mask")
def _chosen_mask(c: OpContext) -> list[Launch]:
    args = [c.dst, c.view(0), c.view(1), i32(c.op.ip[0]), c.runtime]
    return [Launch("chosen_mask", (c.op.dst.shape[1], 1, 1), (256, 1, 1), 0, args)]


@lowers("chosen_list")
def _chosen_list(c: OpContext) -> list[Launch]:
    args = [c.dst, c.view(0), c.view(1), i32(c.op.ip[0])]
    return [Launch("chosen_list", (c.op.dst.shape[1], 1, 1), (32, 1, 1), 0, args)]


def _set_bytes(op: Node) -> int:
    """Bytes of a bit for every stretch."""
    ends = op.src[1]
    assert ends is not None
    return 4 * ceil_div(ends.shape[0], 32)


def too_many_stretches(op: Node) -> str | None:
    """Why the cells of chosen stretches cannot be listed on a device, or None."""
    if _set_bytes(op) > DEFAULT_SHARED_BYTES - STATIC_SHARED_BYTES:
        most = 8 * (DEFAULT_SHARED_BYTES - STATIC_SHARED_BYTES)
        return f"a choice among more than {most} stretches of positions has no CUDA kernel"
    return None


@lowers("stretch_cells")
def _stretch_cells(c: OpContext) -> list[Launch]:
    positions = c.at(4) + c.at(1) + c.at(5) + struct.pack("<2i", c.source(1).shape[0], c.op.ip[0])
    args = [c.dst, c.view(0), c.view(2), c.at(3), positions, c.runtime]
    return [Launch("stretch_cells", (c.op.dst.shape[1], 1, 1), (_CHOICE_THREADS, 1, 1), _set_bytes(c.op), args)]


def _cell_bytes(rows: Value) -> int:
    row = registry.by_id(rows.type_id).row_nbytes(rows.shape[0])
    return (rows.shape[1] - 1) * rows.strides[1] + row


@dataclass(frozen=True)
class Copy:
    """The rows [n, H, cells] of up to n_cells chosen cells, side by side in work memory from `address` on."""

    rows: Value
    n_cells: int
    address: int = 0

    @property
    def stride(self) -> int:
        """Bytes from one cell to the next."""
        return ceil_div(_cell_bytes(self.rows), _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return self.stride * self.n_cells

    def view(self, part: Value) -> bytes:
        """ikpy::cuda::View of a part of the rows; its number of cells is where run-time scalars are read."""
        strides = (*part.strides[:2], self.stride, 0)
        start = self.address + part.offset - self.rows.offset
        return packed_view(start, strides, (*part.shape[:2], self.n_cells, 1), 2)

    def launch(self, c: OpContext, chosen: int) -> Launch:
        """Makes the copy; chosen: address of a token's number of cells and their list."""
        nbytes = _cell_bytes(self.rows)
        sizes = (nbytes, self.rows.strides[2], c.address(self.rows) % _ROW_ALIGNMENT)
        width = next(width for width in (16, 4, 2) if not any(n % width for n in sizes))
        args = [pointer(self.address), i64(self.stride), view(self.rows, c.address), pointer(chosen)]
        grid = (ceil_div(self.n_cells, _GATHER_WARPS), 1, 1)
        return Launch("gather_cells", grid, (32 * _GATHER_WARPS, 1, 1), 0, [*args, i32(nbytes), i32(width)])
