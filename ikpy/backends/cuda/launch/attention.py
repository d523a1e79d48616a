"""Launches of attention."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cache

from ikpy.backends.cuda.launch.base import (
    BF16,
    RUNTIME,
    WORK,
    Launch,
    OpContext,
    Target,
    ceil_div,
    i32,
    is_aligned,
    lowers,
    optional_address,
    view,
)
from ikpy.backends.cuda.launch.indexer import Copy
from ikpy.graph.ir import F16, Node, Value
from ikpy.quants import registry


@dataclass(frozen=True)
class _Operands:
    """Views that an attention kernel reads and writes, and where the number of cells is. mask: and ranges count."""

    q: bytes
    k: bytes
    k1: bytes
    v: bytes
    dst: bytes
    n_kv: int
    mask: bool = True

    def pack(self, c: OpContext, partials: int, n_parts: int) -> bytes:
        """ikpy::cuda::Attention."""
        _, k, v, mask, sinks, k1, ranges = c.op.src[:7]
        assert k is not None and v is not None
        hidden = [optional_address(value, c.address) if self.mask else 0 for value in (mask, ranges)]
        mask_stride = mask.strides[1] if mask is not None else 0
        types = [k.type_id, k1.type_id if k1 is not None else 0, v.type_id]
        views = self.q + self.k + self.k1 + self.v + self.dst
        addresses = [*hidden, optional_address(sinks, c.address), partials, self.n_kv]
        head = struct.pack("<5Qq2f", *addresses, mask_stride, *c.op.fp[:2])
        return views + head + struct.pack("<4i", *types, n_parts) + _biases(c)


def _biases(c: OpContext) -> bytes:
    """What ikpy::cuda::Attention has of biases by positions."""
    if not _is_biased(c.op):
        return bytes(40)
    biases, *positions = c.op.src[8:11]
    addresses = [optional_address(value, c.address) for value in positions]
    farthest = 0 if biases is None else biases.shape[0] // 2
    numbers = struct.pack("<2Qf3i", *addresses, c.op.fp[2], *c.op.ip[2:4], farthest)
    return numbers + struct.pack("<Q", optional_address(biases, c.address))


def _is_biased(op: Node) -> bool:
    """Whether scores depend on positions."""
    return len(op.fp) > 2


# (dk, dv) -> (rows of the kernel for many rows, cells per tile of both kernels, threads of both kernels). The kernel
# for few rows takes 16. Values of 576 / 512 are a part of the key rows. 32 cells where 64 would leave room for one
# block on a multiprocessor with 100 KiB of shared memory, and by their registers for two, not three, on a larger one.
_FLASH = {
    (64, 64): (64, (64, 64), (128, 128)),
    (72, 72): (64, (64, 64), (128, 128)),
    (80, 80): (64, (64, 64), (128, 128)),
    (88, 88): (64, (64, 64), (128, 128)),
    (96, 96): (64, (64, 64), (128, 128)),
    (112, 112): (64, (64, 32), (128, 128)),
    (128, 128): (64, (64, 32), (128, 128)),
    (192, 128): (64, (32, 32), (128, 128)),
    (256, 256): (64, (32, 32), (128, 128)),
    (576, 512): (32, (32, 32), (128, 256)),
}
_FEW_ROWS = 16
# Heads that kernels with biases are made for (kernels/flash_biased.cu), by the end of their names.
_BIASED = {"_biased": (64, 80, 96, 112, 128), "_table": (64, 128)}
# Parts of the cells: enough blocks for the largest devices (132 multiprocessors, two blocks each), none of fewer than
# four tiles. One token of latent attention with up to 16 heads is a single row of tiles: 32768 cells are 256 parts,
# whose results, 8 MiB, are written and read in the L2 cache.
_WANTED_BLOCKS, _MIN_PART_TILES = 264, 4
# Of flash_combine (kernels/flash_long.cu).
_MAX_PARTS, _COMBINE_THREADS, _COMBINE_COLUMNS = 256, 256, 128


@dataclass(frozen=True)
class _Flash:
    """Choice of a flash attention kernel."""

    dk: int
    dv: int
    rows: int
    cells: int
    threads: int
    v_column: int  # -1: values are loaded on their own
    row_tiles: int
    kv_heads: int
    n_parts: int
    biases: str = ""

    @property
    def kernel(self) -> str:
        return f"flash{self.rows}_{self.dk}_{self.dv}" + self.biases

    @property
    def shared_bytes(self) -> int:
        """As ikpy::cuda::Flash::kBytes."""
        key_row = ceil_div(self.dk, 32) * 32 + 8
        values = 0 if self.v_column >= 0 else self.cells * (self.dv + 8)
        probabilities = 0 if self.rows == 64 else self.rows * (self.cells + 8)
        return 2 * (self.rows * key_row + self.cells * key_row + values + probabilities)


def _parts(blocks: int, n_cells: int, tile: int) -> int:
    """Parts of the cells for a kernel that takes so many blocks for each, and as many cells at once as a tile has."""
    return max(1, min(ceil_div(_WANTED_BLOCKS, blocks), n_cells // (_MIN_PART_TILES * tile), _MAX_PARTS))


def _v_column(k: Value, k1: Value | None, v: Value) -> int:
    """First column of the keys (both segments side by side) that the values are a part of, or -1."""
    first = 0
    for segment in (k, k1):
        if segment is None:
            continue
        column = _column_in(segment, v)
        if column >= 0:
            return first + column
        first += segment.shape[0]
    return -1


def _bias_ending(op: Node) -> str:
    """What the names of kernels end with that add the biases of an attention op."""
    if not _is_biased(op):
        return ""
    return "_biased" if op.src[8] is None else "_table"


def flash_shared_bytes(kernel: str) -> int:
    """Dynamic shared memory of a flash attention kernel, 0 for other kernels."""
    for ending in _BIASED:
        kernel = kernel.removesuffix(ending)
    for (dk, dv), (many, cells, threads) in _FLASH.items():
        for choice, rows in enumerate((_FEW_ROWS, many)):
            if kernel == f"flash{rows}_{dk}_{dv}":
                column = 0 if dk == 576 else -1
                return _Flash(dk, dv, rows, cells[choice], threads[choice], column, 1, 1, 1).shared_bytes
    return 0


def _column_in(k: Value, v: Value) -> int:
    same_rows = k.buffer is v.buffer and k.type_id == v.type_id and k.strides[1:3] == v.strides[1:3]
    if not same_rows or v.offset < k.offset or (k.type_name == "q8_KV" and k.offset != v.offset):
        return -1
    row = registry.by_id(k.type_id)
    blocks, rest = divmod(v.offset - k.offset, row.block_bytes)
    column = blocks * row.block_elements
    return -1 if rest or column % 8 or column + v.shape[0] > k.shape[0] else column


def _flash(op: Node, target: Target) -> _Flash | None:
    """The flash kernel for an attention op, None if only the plain one fits."""
    q, k, v, _, _, k1 = op.src[:6]
    assert q is not None and k is not None and v is not None
    dk, dv = k.shape[0] + (k1.shape[0] if k1 is not None else 0), v.shape[0]
    if (dk, dv) not in _FLASH or k.shape[0] % 8 or (k1 is not None and dk == dv):
        return None
    if any(x is not None and x.type_id in (F16, BF16) and not is_aligned(x) for x in (k, v, k1)):
        return None
    column = _v_column(k, k1, v) if dk == 576 else -1
    biases = _bias_ending(op)
    if (dk == 576 and column < 0) or (biases and (dk != dv or dk not in _BIASED[biases])):
        return None
    many, cells, threads = _FLASH[dk, dv]
    n_rows = q.shape[1] // k.shape[1] * q.shape[2]
    choices = [(_FEW_ROWS, 0)] if n_rows <= _FEW_ROWS else [(many, 1), (_FEW_ROWS, 0)]
    for rows, choice in choices:
        row_tiles, kv_heads = ceil_div(n_rows, rows), k.shape[1]
        parts = _parts(row_tiles * kv_heads, k.shape[2], cells[choice])
        flash = _Flash(dk, dv, rows, cells[choice], threads[choice], column, row_tiles, kv_heads, parts, biases)
        if flash.shared_bytes <= target.shared_bytes - 1024:  # some is static
            return flash
    return None


@lowers("attention")
def _attention(c: OpContext) -> list[Launch]:
    if _chosen(c.op) is not None:
        return [launch for t in range(c.op.dst.shape[2]) for launch in _attention_to_chosen(c, t)]
    operands = _Operands(c.view(0), c.view(1), c.view(5), c.view(2), c.dst, c.address(RUNTIME))
    return _launches(c, operands, c.op, c.address(WORK))


def _launches(c: OpContext, operands: _Operands, op: Node, work: int) -> list[Launch]:
    """Launches of an attention op with these operands; work: address of what `_partial_bytes` says."""
    q, v = op.src[0], op.src[2]
    assert q is not None and v is not None
    flash = _flash(op, c.target)
    if flash is None:
        shared = 4 * (q.shape[0] + 4 * v.shape[0])
        args = [operands.pack(c, 0, 1)]
        return [Launch("attention_any", (q.shape[2], q.shape[1], 1), (128, 1, 1), shared, args)]
    struct_bytes = operands.pack(c, work if flash.n_parts > 1 else 0, flash.n_parts)
    grid = (flash.row_tiles, flash.kv_heads, flash.n_parts)
    args = [struct_bytes, i32(max(flash.v_column, 0))]
    launches = [Launch(flash.kernel, grid, (flash.threads, 1, 1), flash.shared_bytes, args)]
    if flash.n_parts > 1:
        grid = (q.shape[1], q.shape[2], ceil_div(flash.dv, _COMBINE_COLUMNS))
        launches.append(Launch("flash_combine", grid, (_COMBINE_THREADS, 1, 1), 0, [struct_bytes]))
    return launches


def _partial_bytes(op: Node, target: Target) -> int:
    """Bytes of the partial results of an attention op, or of one of fewer tokens if that has more.

    Memory is planned for the largest batches, and parts are the more the fewer rows there are.
    """
    q, k = op.src[:2]
    assert q is not None and k is not None
    group, most = q.shape[1] // k.shape[1], 0
    for n_tokens in {min(q.shape[2], max(1, _FEW_ROWS // group)), q.shape[2]}:
        flash = _flash(replace(op, src=[q.slice(2, 0, n_tokens), *op.src[1:]]), target)
        if flash is not None:
            rows = _most_partial_rows(flash.rows, flash.cells, k.shape[1], group, n_tokens, k.shape[2])
            most = max(most, rows * (flash.dv + 2) * 4)
    return most


@cache
def _most_partial_rows(rows: int, tile: int, kv_heads: int, group: int, n_tokens: int, n_cells: int) -> int:
    """Rows of partial results of at most so many tokens; rows, tile: of the kernel."""
    most = 0
    for row_tiles in range(1, ceil_div(n_tokens * group, rows) + 1):
        parts = _parts(row_tiles * kv_heads, n_cells, tile)
        if parts == 1:
            break
        most = max(most, parts * min(n_tokens, row_tiles * rows // group) * kv_heads * group)
    return most


# chosen cells


def _chosen(op: Node) -> Value | None:
    """The lists of cells that tokens attend to, if there are any."""
    return op.src[7] if len(op.src) > 7 else None


def _of_token(op: Node, t: int, top_k: int) -> Node:
    """The op of one token over as many cells as it may have chosen."""
    q, k, v, _, sinks, k1 = op.src[:6]
    assert q is not None and k is not None and v is not None
    cells = [value.slice(2, 0, top_k) if value is not None else None for value in (k, v, k1)]
    src = [q.slice(2, t, 1), cells[0], cells[1], None, sinks, cells[2], None]
    return replace(op, dst=op.dst.slice(2, t, 1), src=src)


def _copies(op: Node, top_k: int, at: int = 0) -> list[Copy]:
    """Of keys, their second segment, and values that lie in neither, one behind the other from an address on."""
    _, k, v, _, _, k1 = op.src[:6]
    assert k is not None and v is not None
    segments = [k] if k1 is None else [k, k1]
    found: list[Copy] = []
    for rows in segments if any(_column_in(each, v) >= 0 for each in segments) else [*segments, v]:
        found.append(Copy(rows, top_k, at))
        at += found[-1].nbytes
    return found


def _attention_to_chosen(c: OpContext, t: int) -> list[Launch]:
    """Copies the rows of a token's cells, which stay in the L2 cache, and attends to all of the copies."""
    chosen, k1, v = _chosen(c.op), c.op.src[5], c.source(2)
    assert chosen is not None
    top_k, list_at, work = chosen.shape[0] - 1, c.address(chosen) + t * chosen.strides[1], c.address(WORK)
    copies, one = _copies(c.op, top_k, work), _of_token(c.op, t, top_k)
    values = next(copy for copy in copies if copy.rows is v or _column_in(copy.rows, v) >= 0)
    operands = _Operands(
        view(one.src[0], c.address),
        copies[0].view(copies[0].rows),
        bytes(64) if k1 is None else copies[1].view(k1),
        values.view(v),
        view(one.dst, c.address),
        list_at,
        mask=False,
    )
    behind = work + sum(copy.nbytes for copy in copies)
    return [*(copy.launch(c, list_at) for copy in copies), *_launches(c, operands, one, behind)]


def work_bytes(op: Node, target: Target) -> int:
    """Bytes of the partial results of an attention op, and of the rows of chosen cells."""
    chosen = _chosen(op)
    if chosen is None:
        return _partial_bytes(op, target)
    top_k = chosen.shape[0] - 1
    rows = sum(copy.nbytes for copy in _copies(op, top_k))
    return rows + _partial_bytes(_of_token(op, 0, top_k), target)
