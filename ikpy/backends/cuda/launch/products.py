"""Launches of matrix products and of the preparation of their activations."""

from __future__ import annotations

from ikpy.backends.cuda.launch import products_bf16
from ikpy.backends.cuda.launch.base import (
    ACT_BF16,
    ACT_F32,
    ACT_Q8,
    FLOAT_WEIGHTS,
    MATVEC_COLUMNS,
    MAX_GRID_YZ,
    VECTOR_WARPS,
    WORK,
    Launch,
    OpContext,
    Target,
    act_row_bytes,
    ceil_div,
    i32,
    i64,
    lowers,
    pointer,
    type_name,
    view,
)
from ikpy.backends.cuda.launch.merging_products import pack_products
from ikpy.backends.cuda.launch.product import Product
from ikpy.graph.ir import F32, Node, Value
from ikpy.quants import registry

KINDS = ("mul_mat", "mul_mat_up_gate", "mul_mat_id", "mul_mat_id_up_gate")
# Rows of a set that a warp of matvec1_ takes twice, or of up and of gate, where they are more than those of a group
# (kernels/matvec_work.cuh): of types with parts.
SET_ROWS = dict.fromkeys(
    (
        *("q2_k", "q3_k", "iq2_k", "iq3_k", "iq5_k", "iq6_k", "iq2_ks", "iq3_ks", "iq5_ks", "iq2_kl"),
        *("iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt"),
    ),
    4,
)
# And of types with tables of points, or with 16 levels, all of which every lane multiplies.
SET_ROWS |= dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m"), 2)
SET_ROWS |= dict.fromkeys(("iq4_nl", "iq4_xs", "iq4_k", "iq4_ks", "iq4_kss", "mxfp4", "nvfp4"), 2)
# Interleaved rows that a lane of matvec1_ multiplies together (kernels/unpack/own_*.cuh), where they are not four if
# blocks lie at multiples of 16 bytes, else two. Five bits with non-linear levels take many registers; bytes of iq1_s_r4
# and iq1_m_r4 belong to four rows.
OWN_ROWS = {"iq5_k_r4": 2, "iq5_ks_r4": 2, "iq1_s_r4": 4, "iq1_m_r4": 4}
OWN_ROWS |= dict.fromkeys(("q4_0_4x4", "q4_0_4x8", "q4_0_8x8"), 1)
# Of the int8 kernels of sm_90 (kernels/matmul_wgmma.cuh), of all types.
WGMMA_S8_SHARED = 70656


@lowers("act_prepare")
def _act_prepare(c: OpContext) -> list[Launch]:
    x = c.source(0)
    return [_prepare(x, c.op.ip[0], c.address(c.op.dst), c)]


def _prepare(x: Value, fmt: int, out: int, c: OpContext) -> Launch:
    n, rows = x.shape[0], x.shape[1] * x.shape[2]
    args = [view(x, c.address), pointer(out), i64(act_row_bytes(fmt, n))]
    grid_rows = max(1, min(rows, MAX_GRID_YZ))
    if fmt == ACT_Q8:
        # 128 elements per warp: rows of up to 512 elements need one block.
        return Launch(
            "act_prepare_q8", (ceil_div(ceil_div(n, 256) * 256, 512), grid_rows, 1), (128, 1, 1), 0, [*args, c.runtime]
        )
    padded = ceil_div(n, 16) * 16 if fmt == ACT_F32 else ceil_div(n, 32) * 32
    args += [i32(padded), i32(fmt), c.runtime]
    return Launch("act_prepare_float", (ceil_div(padded, 256), grid_rows, 1), (256, 1, 1), 0, args)


def lane_rows(name: str) -> int:
    """Interleaved rows that a lane of matvec1_ multiplies together; name in lower case."""
    row = registry.by_name(name)
    if row.interleave == 1:
        return 1
    return OWN_ROWS.get(name, 2 if row.interleave * row.block_bytes % 16 else 4)


def _rows_per_warp(p: Product, wide: bool) -> int:
    """Rows of an output that a warp of matvec1_, or matvec4_ (wide), computes."""
    row = registry.by_id(p.up.type_id)
    set_rows = 1 if wide else SET_ROWS.get(row.name.lower(), 1)
    return row.interleave * set_rows * (1 if p.gate else 2)


def _split(p: Product, rows_per_warp: int, wide: bool) -> int:
    """Warps that share rows: enough for about 2000 warps in all, each with at least two groups per lane.

    Four rows of a lane and more, or interleaved rows that it has together, have as many in one step.
    """
    warps = ceil_div(p.up.shape[1], rows_per_warp)
    row = registry.by_id(p.up.type_id)
    together = 1 if wide else lane_rows(row.name.lower())
    set_rows = SET_ROWS.get(row.name.lower(), 1)
    steps = 1 if together > 1 or set_rows >= (4 if wide else 2) else 2
    least = steps * 32 * together // row.interleave
    split = 1
    while split < 4 and warps * split < 2048 and p.up.shape[0] // 32 >= least * 2 * split:
        split *= 2
    return split


def _product(p: Product) -> list[Launch]:
    if p.fmt == products_bf16.activation_format(p.op, p.context.target):
        return products_bf16.launches(p)
    launches: list[Launch] = []
    x, stride = p.context.address(p.x), act_row_bytes(p.fmt, p.up.shape[0])
    if not p.is_float and p.fmt != ACT_Q8:
        # Types that the CPU multiplies in f32: their activations are quantized here.
        rows = Value(
            p.x.buffer,
            F32,
            (p.up.shape[0], _x_rows(p), 1, 1),
            (4, stride, 0, 0),
            p.x.offset,
            1 if p.n_tokens == 0 and not p.is_by_expert else None,
        )
        x, stride = p.context.address(WORK), act_row_bytes(ACT_Q8, p.up.shape[0])
        launches.append(_prepare(rows, ACT_Q8, x, p.context))
    vector = p.max_columns <= MATVEC_COLUMNS * (p.n_used if p.is_by_expert else 1)
    launches.append(_vector_launch(p, x, stride) if vector else _matrix_launch(p, x, stride))
    return launches


def _x_rows(p: Product) -> int:
    if p.is_by_expert:
        return p.n_tokens * (p.n_used if p.per_slot else 1)
    return p.max_columns * p.op.dst.shape[2]


def _float_args(p: Product) -> list[bytes]:
    return [i32(int(p.fmt == ACT_BF16))] if p.is_float else []


def _vector_launch(p: Product, x: int, stride: int) -> Launch:
    name = type_name(p.up.type_id)
    wide = not p.is_by_expert and p.max_columns > 1
    kernel = f"matvec{4 if wide else 1}_{name}"
    columns = ceil_div(p.max_columns, 4) if wide else p.max_columns
    batches = 1 if p.is_by_expert else p.op.dst.shape[2]
    n_out = p.up.shape[1]
    if p.is_float:
        rows_per_block, split = VECTOR_WARPS, 1
    else:
        rows_per_warp = _rows_per_warp(p, wide)
        split = _split(p, rows_per_warp, wide)
        rows_per_block = rows_per_warp * (VECTOR_WARPS // split)
    args = [pack_products([p.pack(x, stride, split)], [0]), *_float_args(p)]
    blocks = ceil_div(n_out, rows_per_block)
    if p.is_float:  # blocks take rows in turn: there are vocabularies of more than four times the limit
        blocks = min(blocks, MAX_GRID_YZ)
    return Launch(kernel, (columns, blocks, batches), (32 * VECTOR_WARPS, 1, 1), 0, args)


def _matrix_launch(p: Product, x: int, stride: int) -> Launch:
    tile_columns = 64 if p.is_float else 128
    columns = p.n_tokens if p.is_by_expert else p.max_columns  # an expert gets a token once at most
    grid = (
        ceil_div(p.up.shape[1], 32 if p.gate else 64),
        ceil_div(columns, tile_columns),
        p.n_experts if p.is_by_expert else p.op.dst.shape[2],
    )
    name, args = type_name(p.up.type_id), [p.pack(x, stride, 1), *_float_args(p)]
    if _takes_wgmma(p):
        return Launch(f"wgmma_{name}", grid, (256, 1, 1), WGMMA_S8_SHARED, args)
    return Launch(f"matmul_{name}", grid, (256, 1, 1), 0, args)


def _takes_wgmma(p: Product) -> bool:
    """Whether the int8 kernels of sm_90 are to multiply; experts have as many tokens as the mean of all."""
    first = p.context.target.large_products(products_bf16.weight_file(p.up)).wgmma
    columns = p.max_columns / (p.n_experts if p.is_by_expert else 1)
    return not p.is_float and 0 < first <= columns


def _dense(c: OpContext) -> Product:
    op = c.op
    if op.kind == "mul_mat_up_gate":
        up, gate, x, up_bias, gate_bias = op.src
        assert up is not None and x is not None
        return Product(c, up, gate, op.ip[0], x, up_bias, gate_bias, None, op.ip[1], op.ip[2])
    up, x, bias = (*op.src, None)[:3]
    assert up is not None and x is not None
    tokens = op.ip[1] if op.ip[1] > 0 else (0 if op.dst.dynamic_dim == 1 else op.dst.shape[1])
    return Product(c, up, None, op.ip[0], x, bias, None, None, tokens)


def _by_expert(c: OpContext) -> Product:
    op = c.op
    fmt, tokens, third, n_used, n_experts = op.ip
    if op.kind == "mul_mat_id_up_gate":
        up, gate, x, groups, up_bias, gate_bias = op.src
        assert up is not None and x is not None
        return Product(c, up, gate, fmt, x, up_bias, gate_bias, groups, tokens, third, n_used, n_experts, 0)
    up, x, groups, bias = op.src
    assert up is not None and x is not None
    return Product(c, up, None, fmt, x, bias, None, groups, tokens, 0, n_used, n_experts, third)


lowers("mul_mat", "mul_mat_up_gate")(lambda c: _product(_dense(c)))
lowers("mul_mat_id", "mul_mat_id_up_gate")(lambda c: _product(_by_expert(c)))


def work_bytes(op: Node, target: Target) -> int:
    """Bytes of weights that are decoded, or activations that are quantized, for an op."""
    weight = op.src[0]
    assert weight is not None
    if op.ip[0] == products_bf16.activation_format(op, target):
        return products_bf16.work_bytes(op)
    if weight.type_name in FLOAT_WEIGHTS or op.ip[0] == ACT_Q8:
        return 0
    c = OpContext(op, lambda _: 0, target)
    p = _by_expert(c) if "_id" in op.kind else _dense(c)
    return _x_rows(p) * act_row_bytes(ACT_Q8, weight.shape[0])
