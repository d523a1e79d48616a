"""Launches of what depends on positions and the cache: rotations, masks, stores, shifts."""

from __future__ import annotations

import math

import numpy as np

from ikpy.backends.cuda.launch.base import (
    MAX_GRID_YZ,
    Launch,
    OpContext,
    ceil_div,
    f32,
    i32,
    lowers,
    n_rows,
    pointer,
    store_parts,
    view,
)


@lowers("rope_table")
def _rope_table(c: OpContext) -> list[Launch]:
    base, freq_scale, ext, attn_factor, low, high = c.op.fp
    n, tokens = c.op.dst.shape[:2]
    magnitude = attn_factor if ext == 0 else attn_factor * (1.0 + 0.1 * math.log(1.0 / freq_scale))
    # As the native executor: the power is rounded to f32 once and then multiplied up.
    theta_scale = float(np.power(np.float32(base), np.float32(-2.0) / np.float32(n)))
    numbers = [theta_scale, freq_scale, ext, magnitude, low, high]
    inverse, *sections = (*c.op.ip, 0, 0, 0, 0, 0)[:6]
    args = [c.dst, c.at(0), c.at(1), *map(f32, numbers), i32(inverse), *map(i32, sections)]
    return [Launch("rope_table", (tokens, 1, 1), (min(128, ceil_div(n // 2, 32) * 32), 1, 1), 0, args)]


@lowers("rope")
def _rope(c: OpContext) -> list[Launch]:
    _, heads, tokens, _ = c.op.dst.shape
    n, neox, offset = c.op.ip
    args = [c.dst, c.view(0), c.view(1), i32(n), i32(neox), i32(offset)]
    return [Launch("rope", (heads * tokens, 1, 1), (min(128, ceil_div(n // 2, 32) * 32), 1, 1), 0, args)]


@lowers("kq_mask")
def _kq_mask(c: OpContext) -> list[Launch]:
    kind, n_swa, causal, own, *side = c.op.ip
    n_cells = c.source(0).shape[0]
    n_further = c.op.dst.shape[0] - n_cells
    addresses = [c.at(4), c.at(0), c.at(1), c.at(2), c.at(3)]
    further = [c.at(5), c.at(6)] if n_further else [pointer(0), pointer(0)]
    # The cells of a window are all looked at, not the first n_kv.
    runtime = pointer(0) if own else c.runtime
    args = [
        c.dst,
        *addresses,
        *further,
        c.at(7),
        c.at(8),
        i32(n_cells),
        i32(n_further),
        i32(kind),
        i32(n_swa),
        i32(causal),
        i32(side[0] if side else 0),
        runtime,
    ]
    block = (256 if n_cells > 128 else 64, 1, 1)
    return [Launch("kq_mask", (c.op.dst.shape[1], 1, 1), block, 0, args)]


@lowers("kv_store")
def _kv_store(c: OpContext) -> list[Launch]:
    x = c.source(0)
    args = [c.dst, c.view(0), c.at(1), i32(c.op.dst.type_id)]
    units = x.shape[1] * x.shape[2] * store_parts(c.op.dst)
    return [Launch("kv_store", (ceil_div(units, 4), 1, 1), (128, 1, 1), 0, args)]


@lowers("hadamard")
def _hadamard(c: OpContext) -> list[Launch]:
    n = c.op.dst.shape[0]
    args = [c.dst, i32(c.op.ip[0]), c.runtime]
    return [Launch("hadamard_rows", (n_rows(c.op.dst), 1, 1), (128, 1, 1), 4 * n, args)]


@lowers("kv_shift")
def _kv_shift(c: OpContext) -> list[Launch]:
    n, heads, cells, _ = c.op.dst.shape
    launches = []
    for first in range(0, cells, MAX_GRID_YZ):
        count = min(MAX_GRID_YZ, cells - first)
        table, deltas = c.source(0), c.source(1)
        part = [c.op.dst.slice(2, first, count), table.slice(1, first, count), deltas.slice0(first, count)]
        args = [view(part[0], c.address), view(part[1], c.address), pointer(c.address(part[2]))]
        args += [i32(value) for value in (*c.op.ip, c.op.dst.type_id)]
        launches.append(Launch("kv_shift", (heads, count, 1), (32, 1, 1), 4 * n, args))
    return launches
