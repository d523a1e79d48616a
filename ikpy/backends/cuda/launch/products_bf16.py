"""Large products on bf16 tensor cores: quantized rows are decoded to bf16, part by part, and multiplied from there.

The int8 kernels scale their sums once per 32 columns and token, which takes several times as long as the tensor cores
need for the sums; decoding costs the same for any number of tokens. Int8 products of sm_90 (kernels/matmul_wgmma.cuh)
do not change that: their sums need the same scaling.

With activations in ACT_TILES decoded rows are tiles too, and gemm_wgmma multiplies them (sm_90); rows of bf16 weights
are copied to tiles then.
"""

from __future__ import annotations

from dataclasses import replace

from ikpy.backends.cuda.launch.base import (
    ACT_BF16,
    ACT_TILES,
    BF16,
    FLOAT_WEIGHTS,
    TILED_DEPTH,
    TILED_ROWS,
    WORK,
    Launch,
    OpContext,
    Target,
    act_row_bytes,
    ceil_div,
    flat_grid,
    i32,
    is_aligned,
    pointer,
    tiled_bytes,
    type_name,
    view,
)
from ikpy.backends.cuda.launch.files import kernel_file
from ikpy.backends.cuda.launch.product import Product
from ikpy.graph.ir import Buffer, Node, Value, contiguous_strides

KINDS = ("mul_mat", "mul_mat_up_gate")
# Tokens from which products take this way, computed and not measured; `ikpy cuda tune` measures them. Per weight and
# token the int8 kernels convert a sum and scale it once per 32 columns: on sm_90 at best 1024 products per cycle and
# multiprocessor, half of them in practice, where bf16 products reach some 1300 of 2048 (wgmma) or 700 (mma.sync,
# sm_80: half the int8 rate, no scaling). Decoding a weight writes and reads two bytes in the L2 cache, 0.16 cycles at
# 25 bytes per cycle, and takes about as long to unpack: 0.3 / (1 / 512 - 1 / 1300) is 250 tokens.
BF16_TOKENS = 256
# Decoded rows of all matrices of a product at a time: what stays in the L2 cache of large devices.
PART_BYTES = 32 << 20
TILE_ROWS, TILE_TOKENS = 128, 128
# Types of decoded rows: the only weight, up, gate (kernels/tiles.cuh).
TILES, TILES_UP, TILES_GATE = 1030, 1031, 1032
WGMMA_THREADS, WGMMA_SHARED = 288, 3 * 2 * tiled_bytes(TILED_DEPTH, TILED_ROWS) + 1024


def activation_format(op: Node, target: Target) -> int | None:
    """Format of the activations if an op, or another product of this size, is to take one of these ways."""
    weights = op.src[: _n_matrices(op)]
    if op.kind not in KINDS or op.dst.shape[2] != 1 or weights[0] is None:
        return None
    large = target.large_products(weight_file(weights[0]))
    if not large.tokens or op.ip[1] < large.tokens:
        return None
    if not all(w is not None and w.shape[2] == 1 and _takes(w) for w in weights):
        return None
    return large.format if weights[0].shape[0] % TILED_DEPTH == 0 else ACT_BF16


def weight_file(weight: Value) -> str:
    """Kernel file of a weight's type."""
    return kernel_file(f"matmul_{type_name(weight.type_id)}")


def _takes(weight: Value) -> bool:
    quantized = weight.type_name not in FLOAT_WEIGHTS
    return quantized or (weight.type_name == "bf16" and weight.shape[0] % 8 == 0 and is_aligned(weight))


def launches(p: Product) -> list[Launch]:
    """Launches of a product with activations in ACT_BF16 or ACT_TILES."""
    if p.is_float and p.fmt == ACT_BF16:
        return [_gemm(p)]
    found = []
    rows = _rows_per_part(p.op)
    for first in range(0, p.up.shape[1], rows):
        found += _part(p, first, min(rows, p.up.shape[1] - first))
    return found


def work_bytes(op: Node) -> int:
    """Bytes of decoded rows."""
    weight = op.src[0]
    assert weight is not None
    if weight.type_name in FLOAT_WEIGHTS and op.ip[0] == ACT_BF16:
        return 0
    return tiled_bytes(weight.shape[0], min(_rows_per_part(op), weight.shape[1]) * _n_matrices(op))


def _n_matrices(op: Node) -> int:
    return 2 if op.kind == "mul_mat_up_gate" else 1


def _rows_per_part(op: Node) -> int:
    """A multiple of the tile, and so of all numbers of interleaved rows."""
    weight = op.src[0]
    assert weight is not None
    fitting = PART_BYTES // (2 * weight.shape[0] * _n_matrices(op))
    return max(1, fitting // TILE_ROWS) * TILE_ROWS


def _gemm(p: Product) -> Launch:
    grid = (ceil_div(p.up.shape[1], TILE_ROWS // (2 if p.gate else 1)), ceil_div(p.n_tokens, TILE_TOKENS), 1)
    args = [p.pack(p.context.address(p.x), act_row_bytes(ACT_BF16, p.up.shape[0]), 1)]
    if p.fmt == ACT_TILES:
        return Launch("gemm_wgmma", grid, (WGMMA_THREADS, 1, 1), WGMMA_SHARED, args)
    return Launch("gemm_bf16", grid, (256, 1, 1), 0, args)


def _part(p: Product, first: int, count: int) -> list[Launch]:
    """The rows of the result from `first` on."""
    tiled = p.fmt == ACT_TILES
    decoded = [_decoded(weight.shape[0], count) for weight in (p.up, p.gate) if weight is not None]
    places = {id(value): 0 if tiled else i * value.buffer.nbytes for i, value in enumerate(decoded)}
    outer = p.context

    def address(value: Value) -> int:
        return outer.address(WORK) + places[id(value)] if id(value) in places else outer.address(value)

    context = OpContext(replace(p.op, dst=p.op.dst.slice0(first, count)), address, outer.target)
    biases = [None if b is None else b.slice0(first, count) for b in (p.up_bias, p.gate_bias)]
    up, gate = decoded[0], decoded[1] if len(decoded) > 1 else None
    part = replace(p, context=context, up=up, gate=gate, up_bias=biases[0], gate_bias=biases[1])
    sources = [weight.slice(1, first, count) for weight in (p.up, p.gate) if weight is not None]
    types = [BF16] * 2 if not tiled else [TILES_UP, TILES_GATE] if p.gate else [TILES]
    return [*(_decode(context, *each) for each in zip(sources, decoded, types, strict=False)), _gemm(part)]


def _decoded(n_in: int, rows: int) -> Value:
    strides = contiguous_strides(BF16, (n_in, rows))
    return Value(Buffer(strides[2]), BF16, (n_in, rows, 1, 1), strides)


def _decode(c: OpContext, weight: Value, decoded: Value, out_type: int) -> Launch:
    args = [view(decoded, c.address), view(weight, c.address), pointer(0), i32(out_type)]
    if weight.type_name in FLOAT_WEIGHTS:
        grid = flat_grid(decoded, 8)
        return Launch("rows_float", grid, (256, 1, 1), 0, [*args, i32(weight.type_id), c.runtime])
    return Launch(f"rows_{type_name(weight.type_id)}", flat_grid(decoded, 32), (256, 1, 1), 0, [*args, c.runtime])
