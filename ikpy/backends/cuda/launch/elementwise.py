"""Launches of element-wise ops, copies and row look-ups."""

from __future__ import annotations

from math import inf

from ikpy.backends.cuda.launch.base import (
    FLOAT_WEIGHTS,
    Launch,
    OpContext,
    ceil_div,
    f32,
    flat_grid,
    i32,
    lowers,
    n_rows,
    optional_address,
    pointer,
    store_parts,
    type_name,
    vector_width,
    view,
)
from ikpy.graph.ir import F32, Value


def _unary(c: OpContext, kind: int, *parameters: float) -> list[Launch]:
    width = vector_width(c.op.dst, c.source(0))
    values = [*parameters, 0.0, 0.0, 0.0, 0.0][:4]
    args = [c.dst, c.view(0), i32(kind), *map(f32, values), i32(width), c.runtime]
    return [Launch("unary_f32", flat_grid(c.op.dst, width), (256, 1, 1), 0, args)]


def _gated(c: OpContext) -> list[Launch]:
    limit = c.op.fp[0] if c.op.fp else 0.0  # products that are divided into their parts have none
    return _binary(c, c.op.ip[0], limit if limit > 0 else inf)


def _binary(c: OpContext, kind: int, limit: float = inf) -> list[Launch]:
    width = vector_width(c.op.dst, c.source(0), c.source(1))
    args = [c.dst, c.view(0), c.view(1), i32(kind), f32(limit), i32(width), c.runtime]
    return [Launch("binary_f32", flat_grid(c.op.dst, width), (256, 1, 1), 0, args)]


_SCALE, _SOFTCAP, _ADD, _MUL = 16, 17, 16, 17

lowers("add")(lambda c: _binary(c, _ADD))
lowers("mul")(lambda c: _binary(c, _MUL))
lowers("gated_unary")(_gated)
lowers("unary")(lambda c: _unary(c, c.op.ip[0], *c.op.fp[:4]))
lowers("scale")(lambda c: _unary(c, _SCALE, *c.op.fp[:2]))
lowers("softcap")(lambda c: _unary(c, _SOFTCAP, c.op.fp[0]))


@lowers("copy")
def _copy(c: OpContext) -> list[Launch]:
    dst, src = c.op.dst, c.source(0)
    if src.type_id != F32:
        return _decode_rows(c, src, None)
    if dst.type_id != F32:
        args = [c.dst, c.view(0), i32(dst.type_id), c.runtime]
        units = n_rows(dst) * store_parts(dst)
        return [Launch("copy_to_type", (max(1, min(ceil_div(units, 8), 65536)), 1, 1), (256, 1, 1), 0, args)]
    width = vector_width(dst, src)
    args = [c.dst, c.view(0), i32(width), c.runtime]
    return [Launch("copy_f32", flat_grid(dst, width), (256, 1, 1), 0, args)]


@lowers("get_rows")
def _get_rows(c: OpContext) -> list[Launch]:
    return _decode_rows(c, c.source(0), c.source(1))


def _decode_rows(c: OpContext, src: Value, ids: Value | None) -> list[Launch]:
    """dst = rows of src as floats."""
    dst = c.op.dst
    args = [c.dst, view(src, c.address), pointer(optional_address(ids, c.address)), i32(dst.type_id)]
    if src.type_name in FLOAT_WEIGHTS:
        args += [i32(src.type_id), c.runtime]
        return [Launch("rows_float", flat_grid(dst, 1), (256, 1, 1), 0, args)]
    return [Launch(f"rows_{type_name(src.type_id)}", flat_grid(dst, 32), (256, 1, 1), 0, [*args, c.runtime])]


@lowers("attention_temperature")
def _attention_temperature(c: OpContext) -> list[Launch]:
    n = c.op.dst.shape[2]
    args = [pointer(c.address(c.op.dst)), c.at(0), i32(n), i32(c.op.ip[0]), i32(c.op.ip[1]), f32(c.op.fp[0])]
    return [Launch("attention_temperature", (ceil_div(n, 128), 1, 1), (128, 1, 1), 0, args)]
