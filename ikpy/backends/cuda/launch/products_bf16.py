"""Large products on bf16 tensor cores: quantized rows are decoded to bf16, part by part, and multiplied from there.

The int8 kernels scale their sums once per 32 columns and token, which takes several times as long as the tensor cores
need for the sums; decoding costs the same for any number of tokens.
"""

from __future__ import annotations

from dataclasses import replace

from ikpy.backends.cuda.launch.base import (
    ACT_BF16,
    BF16,
    FLOAT_WEIGHTS,
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
    type_name,
    view,
)
from ikpy.backends.cuda.launch.product import Product
from ikpy.graph.ir import Buffer, Node, Value, contiguous_strides

KINDS = ("mul_mat", "mul_mat_up_gate")
# Tokens from which products take this way. Not measured yet: an estimate from the instruction rates of sm_80 and
# sm_90. `scripts/test_cuda bench MODEL` prints prompt speeds with the way taken always and never; the crossover is
# where the two lines meet.
BF16_TOKENS = 256
# Decoded rows of all matrices of a product at a time: what stays in the L2 cache of large devices.
PART_BYTES = 32 << 20
TILE_ROWS, TILE_TOKENS = 128, 128


def wanted(op: Node, target: Target) -> bool:
    """Whether activations of an op shall be prepared as bf16 for this way; also for ops that do not take it then."""
    if op.kind not in KINDS or not target.bf16_tokens or op.ip[1] < target.bf16_tokens:
        return False
    weights = op.src[:2] if op.kind == "mul_mat_up_gate" else op.src[:1]
    return op.dst.shape[2] == 1 and all(w is not None and w.shape[2] == 1 and _takes(w) for w in weights)


def _takes(weight: Value) -> bool:
    quantized = weight.type_name not in FLOAT_WEIGHTS
    return quantized or (weight.type_name == "bf16" and weight.shape[0] % 8 == 0 and is_aligned(weight))


def launches(p: Product) -> list[Launch]:
    """Launches of a product with activations in bf16."""
    if p.is_float:
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
    if weight.type_name in FLOAT_WEIGHTS:
        return 0
    return min(_rows_per_part(op), weight.shape[1]) * 2 * weight.shape[0] * _n_matrices(op)


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
    stride = act_row_bytes(ACT_BF16, p.up.shape[0])
    return Launch("gemm_bf16", grid, (256, 1, 1), 0, [p.pack(p.context.address(p.x), stride, 1)])


def _part(p: Product, first: int, count: int) -> list[Launch]:
    """The rows of the result from `first` on."""
    decoded = [_decoded(weight.shape[0], count) for weight in (p.up, p.gate) if weight is not None]
    places = {id(value): i * value.buffer.nbytes for i, value in enumerate(decoded)}
    outer = p.context

    def address(value: Value) -> int:
        return outer.address(WORK) + places[id(value)] if id(value) in places else outer.address(value)

    context = OpContext(replace(p.op, dst=p.op.dst.slice0(first, count)), address, outer.target)
    biases = [None if b is None else b.slice0(first, count) for b in (p.up_bias, p.gate_bias)]
    up, gate = decoded[0], decoded[1] if len(decoded) > 1 else None
    part = replace(p, context=context, up=up, gate=gate, up_bias=biases[0], gate_bias=biases[1])
    sources = [weight.slice(1, first, count) for weight in (p.up, p.gate) if weight is not None]
    return [*(_decode(context, s, d) for s, d in zip(sources, decoded, strict=True)), _gemm(part)]


def _decoded(n_in: int, rows: int) -> Value:
    strides = contiguous_strides(BF16, (n_in, rows))
    return Value(Buffer(strides[2]), BF16, (n_in, rows, 1, 1), strides)


def _decode(c: OpContext, weight: Value, decoded: Value) -> Launch:
    args = [view(decoded, c.address), view(weight, c.address), pointer(0), i32(BF16), c.runtime]
    return Launch(f"rows_{type_name(weight.type_id)}", flat_grid(decoded, 32), (256, 1, 1), 0, args)
