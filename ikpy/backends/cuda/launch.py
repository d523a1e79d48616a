"""Lowering of graph ops to kernel launches: which kernels run an op, with which geometry and arguments.

``lower`` needs no device: addresses come from the caller. Two values stand for memory the caller provides besides
the graph's own: RUNTIME, int32 [4] with n_kv first, which kernels read so that a captured launch can be replayed, and
WORK, scratch memory of ``work_bytes`` (the maximum over the ops of a plan; ops run one after the other).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from ikpy.graph.ir import F16, F32, I32, Buffer, Node, Value
from ikpy.quants import registry

Address = Callable[[Value], int]
Dim3 = tuple[int, int, int]

BF16, BF16_R16 = 30, 230
KV_TYPES = {"f32", "f16", "bf16", "q8_0", "q6_0", "q4_0", "iq4_nl", "q8_KV"}
FLOAT_WEIGHTS = {"f32", "f16", "bf16", "bf16_r16"}
ACT_F32, ACT_Q8, ACT_BF16 = 0, 1, 2

# Columns (tokens or assignments of experts) up to which the matrix-vector kernels run. Above, a tensor-core tile of
# eight columns costs no more than reading the weights once.
MATVEC_COLUMNS = 8
MAX_EXPERTS = 512
MAX_GRID_YZ = 65535
SHARED_LIMIT = 99 * 1024  # of sm_86, sm_89 and sm_120


def _sentinel(name: str, nbytes: int) -> Value:
    return Value(Buffer(nbytes), I32, (nbytes // 4, 1, 1, 1), (4, nbytes, nbytes, nbytes), name=name)


RUNTIME = _sentinel("runtime", 16)
WORK = _sentinel("work", 0)


def shared_limit(capability: tuple[int, int]) -> int:
    """Shared memory in bytes that a block may have at most (CUDA guide); more than SHARED_LIMIT is not used."""
    return 64 * 1024 if capability < (8, 0) else SHARED_LIMIT


class Launch(NamedTuple):
    """One kernel launch; args are the packed parameters in order."""

    kernel: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    args: list[bytes]


def pointer(address: int) -> bytes:
    return struct.pack("<Q", address)


def i32(value: int) -> bytes:
    return struct.pack("<i", value)


def i64(value: int) -> bytes:
    return struct.pack("<q", value)


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def view(value: Value | None, address: Address) -> bytes:
    """ikpy::cuda::View of a value; all zero for None."""
    if value is None:
        return bytes(64)
    dynamic = -1 if value.dynamic_dim is None else value.dynamic_dim
    return struct.pack("<Q4q4iii", address(value), *value.strides, *value.shape, dynamic, 0)


def _optional(value: Value | None, address: Address) -> int:
    return 0 if value is None else address(value)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _rows(value: Value) -> int:
    return value.shape[1] * value.shape[2] * value.shape[3]


def type_name(type_id: int) -> str:
    """Name of a weight type as in kernel names."""
    return registry.by_id(type_id).name.lower()


def act_row_bytes(fmt: int, n_in: int) -> int:
    """Bytes from one row of prepared activations to the next, as in the native executor."""
    if fmt == ACT_Q8:
        n = _ceil(n_in, 256) * 256 * 15 // 8
    elif fmt == ACT_BF16:
        n = _ceil(n_in, 32) * 64
    else:
        n = _ceil(n_in, 16) * 64
    return (_ceil(n, 64) | 1) * 64


@dataclass
class _Context:
    """An op being lowered."""

    op: Node
    address: Address
    shared_limit: int

    def source(self, i: int) -> Value:
        value = self.op.src[i]
        assert value is not None, f"{self.op.kind} lacks source {i}"
        return value

    def view(self, i: int) -> bytes:
        return view(self.op.src[i] if i < len(self.op.src) else None, self.address)

    @property
    def dst(self) -> bytes:
        return view(self.op.dst, self.address)

    @property
    def runtime(self) -> bytes:
        return pointer(self.address(RUNTIME))

    def at(self, i: int) -> bytes:
        return pointer(_optional(self.op.src[i] if i < len(self.op.src) else None, self.address))


Lowering = Callable[[_Context], list[Launch]]
_LOWERINGS: dict[str, Lowering] = {}


def _lowers(*kinds: str) -> Callable[[Lowering], Lowering]:
    def decorate(function: Lowering) -> Lowering:
        _LOWERINGS.update(dict.fromkeys(kinds, function))
        return function

    return decorate


def lower(op: Node, address: Address, shared_limit: int = SHARED_LIMIT) -> list[Launch]:
    """The launches that carry out an op that ``supports`` accepts, in order, on one stream.

    shared_limit: shared memory in bytes that a block may have at most on the device (with opting in).
    """
    return _LOWERINGS[op.kind](_Context(op, address, shared_limit))


# --- element-wise ---------------------------------------------------------------------------------------------------


def _is_aligned(value: Value) -> bool:
    """Whether rows can be read 16 bytes at a time (buffers are aligned to 16)."""
    strides = [s for n, s in zip(value.shape[1:], value.strides[1:], strict=True) if n > 1]
    return value.offset % 16 == 0 and all(s % 16 == 0 for s in strides)


def _width(*values: Value) -> int:
    """Elements per thread: 4 if all rows allow float4, else 1. A value of one column does not count."""
    wide = [v for v in values if v.shape[0] != 1 or v is values[0]]
    return 4 if all(v.shape[0] % 4 == 0 and _is_aligned(v) for v in wide) else 1


def _flat_grid(value: Value, width: int) -> Dim3:
    return (max(1, min(_ceil(value.n_elements, 256 * width), 65536)), 1, 1)


def _unary(c: _Context, kind: int, a: float = 0.0, b: float = 0.0) -> list[Launch]:
    width = _width(c.op.dst, c.source(0))
    args = [c.dst, c.view(0), i32(kind), f32(a), f32(b), i32(width), c.runtime]
    return [Launch("unary_f32", _flat_grid(c.op.dst, width), (256, 1, 1), 0, args)]


def _binary(c: _Context, kind: int) -> list[Launch]:
    width = _width(c.op.dst, c.source(0), c.source(1))
    args = [c.dst, c.view(0), c.view(1), i32(kind), i32(width), c.runtime]
    return [Launch("binary_f32", _flat_grid(c.op.dst, width), (256, 1, 1), 0, args)]


_SCALE, _SOFTCAP, _ADD, _MUL = 16, 17, 16, 17

_lowers("add")(lambda c: _binary(c, _ADD))
_lowers("mul")(lambda c: _binary(c, _MUL))
_lowers("gated_unary")(lambda c: _binary(c, c.op.ip[0]))
_lowers("unary")(lambda c: _unary(c, c.op.ip[0]))
_lowers("scale")(lambda c: _unary(c, _SCALE, *c.op.fp[:2]))
_lowers("softcap")(lambda c: _unary(c, _SOFTCAP, c.op.fp[0]))


def _store_parts(row: Value) -> int:
    """Parts of a row that warps store on their own; a row with one scale is a single part."""
    return 1 if row.type_name == "q8_KV" else _ceil(row.shape[0], 32)


@_lowers("copy")
def _copy(c: _Context) -> list[Launch]:
    dst, src = c.op.dst, c.source(0)
    if src.type_id != F32:
        return _decode_rows(c, src, None)
    if dst.type_id != F32:
        args = [c.dst, c.view(0), i32(dst.type_id), c.runtime]
        units = _rows(dst) * _store_parts(dst)
        return [Launch("copy_to_type", (max(1, min(_ceil(units, 8), 65536)), 1, 1), (256, 1, 1), 0, args)]
    width = _width(dst, src)
    args = [c.dst, c.view(0), i32(width), c.runtime]
    return [Launch("copy_f32", _flat_grid(dst, width), (256, 1, 1), 0, args)]


@_lowers("get_rows")
def _get_rows(c: _Context) -> list[Launch]:
    return _decode_rows(c, c.source(0), c.source(1))


def _decode_rows(c: _Context, src: Value, ids: Value | None) -> list[Launch]:
    """dst = rows of src as floats."""
    dst = c.op.dst
    args = [c.dst, view(src, c.address), pointer(_optional(ids, c.address)), i32(dst.type_id)]
    if src.type_name in FLOAT_WEIGHTS:
        args += [i32(src.type_id), c.runtime]
        return [Launch("rows_float", _flat_grid(dst, 1), (256, 1, 1), 0, args)]
    return [Launch(f"rows_{type_name(src.type_id)}", _flat_grid(dst, 32), (256, 1, 1), 0, [*args, c.runtime])]


@_lowers("attention_temperature")
def _attention_temperature(c: _Context) -> list[Launch]:
    n = c.op.dst.shape[2]
    args = [pointer(c.address(c.op.dst)), c.at(0), i32(n), i32(c.op.ip[0]), i32(c.op.ip[1]), f32(c.op.fp[0])]
    return [Launch("attention_temperature", (_ceil(n, 128), 1, 1), (128, 1, 1), 0, args)]


# --- norms ----------------------------------------------------------------------------------------------------------


def _row_block(n: int) -> Dim3:
    """Threads for one row of n elements: at least four elements each."""
    return (min(1024, max(32, _ceil(n, 4 * 32) * 32)), 1, 1)


@_lowers("rms_norm")
def _rms_norm(c: _Context) -> list[Launch]:
    args = [c.dst, c.view(0), c.view(1), c.view(2), c.view(3), f32(c.op.fp[0]), c.runtime]
    return [Launch("rms_norm", (_rows(c.op.dst), 1, 1), _row_block(c.op.dst.shape[0]), 0, args)]


# Shared memory of a block without opting in to more.
_MAX_FUSED_ROW = 48 * 1024 // 4 - 256


def joined(norm: Node, prepare: Node) -> Node | None:
    """One op for an RMS norm and the int8 activation preparation of its result, or None if they do not fit together.

    Its sources are those of the norm and, last, the prepared activations, which it writes. Arenas must be planned with
    the joined op: it reads rows of its sources while other rows of its results are written.
    """
    if norm.kind != "rms_norm" or prepare.kind != "act_prepare" or prepare.ip[0] != ACT_Q8:
        return None
    x = prepare.src[0]
    if x is not norm.dst or x.shape[0] > _MAX_FUSED_ROW or x.dynamic_dim is not None or not x.is_contiguous:
        return None
    src = [*norm.src, *[None] * (4 - len(norm.src)), prepare.dst]
    return Node("rms_norm_q8", norm.dst, src, [], norm.fp, [*norm.writes, prepare.dst])


@_lowers("rms_norm_q8")
def _rms_norm_q8(c: _Context) -> list[Launch]:
    n = c.op.dst.shape[0]
    prepared = [c.at(4), i64(act_row_bytes(ACT_Q8, n))]
    args = [c.dst, c.view(0), c.view(1), c.view(2), c.view(3), f32(c.op.fp[0]), *prepared, c.runtime]
    shared = _ceil(n, 256) * 256 * 4
    return [Launch("rms_norm_q8", (_rows(c.op.dst), 1, 1), _row_block(n), shared, args)]


@_lowers("layer_norm")
def _layer_norm(c: _Context) -> list[Launch]:
    args = [c.dst, c.view(0), c.view(1), c.view(2), f32(c.op.fp[0]), c.runtime]
    return [Launch("layer_norm", (_rows(c.op.dst), 1, 1), _row_block(c.op.dst.shape[0]), 0, args)]


# --- positions and cache --------------------------------------------------------------------------------------------


@_lowers("rope_table")
def _rope_table(c: _Context) -> list[Launch]:
    base, freq_scale, ext, attn_factor, low, high = c.op.fp
    n, tokens = c.op.dst.shape[:2]
    magnitude = attn_factor if ext == 0 else attn_factor * (1.0 + 0.1 * math.log(1.0 / freq_scale))
    # As the native executor: the power is rounded to f32 once and then multiplied up.
    theta_scale = float(np.power(np.float32(base), np.float32(-2.0) / np.float32(n)))
    numbers = [theta_scale, freq_scale, ext, magnitude, low, high]
    args = [c.dst, c.at(0), c.at(1), *map(f32, numbers)]
    return [Launch("rope_table", (tokens, 1, 1), (min(128, _ceil(n // 2, 32) * 32), 1, 1), 0, args)]


@_lowers("rope")
def _rope(c: _Context) -> list[Launch]:
    _, heads, tokens, _ = c.op.dst.shape
    n, neox, offset = c.op.ip
    args = [c.dst, c.view(0), c.view(1), i32(n), i32(neox), i32(offset)]
    return [Launch("rope", (heads * tokens, 1, 1), (min(128, _ceil(n // 2, 32) * 32), 1, 1), 0, args)]


@_lowers("kq_mask")
def _kq_mask(c: _Context) -> list[Launch]:
    kind, n_swa, causal, own = c.op.ip
    n_cells = c.source(0).shape[0]
    addresses = [c.at(4), c.at(0), c.at(1), c.at(2), c.at(3)]
    # The cells of a window are all looked at, not the first n_kv.
    runtime = pointer(0) if own else c.runtime
    args = [c.dst, *addresses, i32(n_cells), i32(kind), i32(n_swa), i32(causal), runtime]
    block = (256 if n_cells > 128 else 64, 1, 1)
    return [Launch("kq_mask", (c.op.dst.shape[1], 1, 1), block, 0, args)]


@_lowers("kv_store")
def _kv_store(c: _Context) -> list[Launch]:
    x = c.source(0)
    args = [c.dst, c.view(0), c.at(1), i32(c.op.dst.type_id)]
    units = x.shape[1] * x.shape[2] * _store_parts(c.op.dst)
    return [Launch("kv_store", (_ceil(units, 4), 1, 1), (128, 1, 1), 0, args)]


@_lowers("hadamard")
def _hadamard(c: _Context) -> list[Launch]:
    n = c.op.dst.shape[0]
    args = [c.dst, i32(c.op.ip[0]), c.runtime]
    return [Launch("hadamard_rows", (_rows(c.op.dst), 1, 1), (128, 1, 1), 4 * n, args)]


@_lowers("kv_shift")
def _kv_shift(c: _Context) -> list[Launch]:
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


# --- mixture of experts ---------------------------------------------------------------------------------------------


@_lowers("moe_route")
def _moe_route(c: _Context) -> list[Launch]:
    k, gating, normalize, n_group, n_group_used, ser_min = c.op.ip
    scale, threshold, epsilon = c.op.fp
    n_expert, tokens = c.source(0).shape[:2]
    integers = (n_expert, k, gating, normalize, n_group, n_group_used, ser_min)
    parameters = struct.pack("<7i3f", *integers, scale, threshold, epsilon)
    args = [c.dst, c.view(2), c.view(0), c.at(1), parameters]
    return [Launch("moe_route", (tokens, 1, 1), (32, 1, 1), 0, args)]


@_lowers("moe_group")
def _moe_group(c: _Context) -> list[Launch]:
    n_expert = c.op.ip[0]
    n = c.source(0).shape[0] * c.source(0).shape[1]
    args = [pointer(c.address(c.op.dst)), c.view(0), i32(n_expert)]
    threads = 1024 if n > 4096 else 256
    return [
        Launch("moe_offsets", (1, 1, 1), (threads, 1, 1), 0, args),
        Launch("moe_entries", (_ceil(n_expert, 4), 1, 1), (128, 1, 1), 0, args),
    ]


@_lowers("moe_combine")
def _moe_combine(c: _Context) -> list[Launch]:
    n, tokens = c.op.dst.shape[:2]
    args = [c.dst, c.view(0), c.view(1), c.view(2), c.view(3)]
    return [Launch("moe_combine", (_ceil(n, 128), tokens, 1), (128, 1, 1), 0, args)]


# --- statistics -----------------------------------------------------------------------------------------------------


@_lowers("act_stats")
def _act_stats(c: _Context) -> list[Launch]:
    n_matrices, rows_per_entry = c.op.ip
    args = [pointer(c.address(c.op.dst)), c.view(0), c.at(1), i32(n_matrices), i32(rows_per_entry)]
    return [Launch("act_stats", (_ceil(c.source(0).shape[0], 128), n_matrices, 1), (128, 1, 1), 0, args)]


@_lowers("act_similarity")
def _act_similarity(c: _Context) -> list[Launch]:
    blocks = max(1, min(c.op.ip[0], c.source(0).shape[1]))
    args = [pointer(c.address(c.op.dst)), c.view(0), c.view(1)]
    return [Launch("act_similarity", (blocks, 1, 1), (256, 1, 1), 0, args)]


# --- matrix products ------------------------------------------------------------------------------------------------


@_lowers("act_prepare")
def _act_prepare(c: _Context) -> list[Launch]:
    x = c.source(0)
    return [_prepare(x, c.op.ip[0], c.address(c.op.dst), c)]


def _prepare(x: Value, fmt: int, out: int, c: _Context) -> Launch:
    n, rows = x.shape[0], x.shape[1] * x.shape[2]
    args = [view(x, c.address), pointer(out), i64(act_row_bytes(fmt, n))]
    grid_rows = max(1, min(rows, MAX_GRID_YZ))
    if fmt == ACT_Q8:
        # 128 elements per warp: rows of up to 512 elements need one block.
        return Launch(
            "act_prepare_q8", (_ceil(_ceil(n, 256) * 256, 512), grid_rows, 1), (128, 1, 1), 0, [*args, c.runtime]
        )
    padded = _ceil(n, 32) * 32 if fmt == ACT_BF16 else _ceil(n, 16) * 16
    args += [i32(padded), i32(int(fmt == ACT_BF16)), c.runtime]
    return Launch("act_prepare_float", (_ceil(padded, 256), grid_rows, 1), (256, 1, 1), 0, args)


@dataclass
class _Product:
    """A matrix product in the terms of ikpy::cuda::Product."""

    c: _Context
    up: Value
    gate: Value | None
    fmt: int
    x: Value
    up_bias: Value | None
    gate_bias: Value | None
    groups: Value | None
    n_tokens: int  # 0 = n_kv at run time
    activation: int = 0
    n_used: int = 1
    n_experts: int = 0
    per_slot: int = 0

    @property
    def is_float(self) -> bool:
        return self.up.type_name in FLOAT_WEIGHTS

    @property
    def is_by_expert(self) -> bool:
        return self.groups is not None

    @property
    def max_columns(self) -> int:
        """Tokens of a batch, or assignments of all experts, at most."""
        if self.is_by_expert:
            return self.n_tokens * self.n_used
        return self.n_tokens or self.c.op.dst.shape[1]

    def pack(self, x: int, x_stride: int, split: int) -> bytes:
        address, dst = self.c.address, self.c.op.dst
        pointers = [
            address(self.up),
            _optional(self.gate, address),
            x,
            address(dst),
            _optional(self.up_bias, address),
            _optional(self.gate_bias, address),
            _optional(self.groups, address),
            address(RUNTIME),
        ]
        bias = self.up_bias
        bias_stride = bias.strides[1] // 4 if bias is not None and bias.shape[1] > 1 else 0
        longs = [self.up.strides[1], self.up.strides[2], x_stride, dst.strides[1], dst.strides[2], bias_stride]
        n_matrices = self.n_experts if self.is_by_expert else self.up.shape[2]
        integers = [self.up.shape[0], self.up.shape[1], self.max_columns if self.is_by_expert else self.n_tokens]
        integers += [n_matrices, self.activation, int(dst.type_id == F16)]
        integers += [self.n_used, self.n_experts, self.per_slot, split]
        return struct.pack("<8Q6q10i", *pointers, *longs, *integers)


def _is_interleaved(type_id: int) -> bool:
    return registry.by_id(type_id).interleave > 1


def _split(p: _Product) -> int:
    """Warps that share rows: enough for about 2000 warps in all, each with at least two groups per lane."""
    rows_per_warp = registry.by_id(p.up.type_id).interleave * (1 if p.gate else 2)
    warps = _ceil(p.up.shape[1], rows_per_warp)
    lanes_per_row = 32 // registry.by_id(p.up.type_id).interleave
    split = 1
    while split < 4 and warps * split < 2048 and p.up.shape[0] // 32 >= 2 * lanes_per_row * 2 * split:
        split *= 2
    return split


def _product(p: _Product) -> list[Launch]:
    launches: list[Launch] = []
    x, stride = p.c.address(p.x), act_row_bytes(p.fmt, p.up.shape[0])
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
        x, stride = p.c.address(WORK), act_row_bytes(ACT_Q8, p.up.shape[0])
        launches.append(_prepare(rows, ACT_Q8, x, p.c))
    vector = p.max_columns <= MATVEC_COLUMNS * (p.n_used if p.is_by_expert else 1)
    launches.append(_vector_launch(p, x, stride) if vector else _matrix_launch(p, x, stride))
    return launches


def _x_rows(p: _Product) -> int:
    if p.is_by_expert:
        return p.n_tokens * (p.n_used if p.per_slot else 1)
    return p.max_columns * p.c.op.dst.shape[2]


def _float_args(p: _Product) -> list[bytes]:
    return [i32(int(p.fmt == ACT_BF16))] if p.is_float else []


def _vector_launch(p: _Product, x: int, stride: int) -> Launch:
    name = type_name(p.up.type_id)
    wide = not p.is_by_expert and p.max_columns > 1
    kernel = f"matvec{4 if wide else 1}_{name}"
    columns = _ceil(p.max_columns, 4) if wide else p.max_columns
    batches = 1 if p.is_by_expert else p.c.op.dst.shape[2]
    n_out = p.up.shape[1]
    if p.is_float:
        rows_per_block, split = 4, 1
    else:
        split = _split(p)
        rows_per_block = registry.by_id(p.up.type_id).interleave * (1 if p.gate else 2) * (4 // split)
    args = [p.pack(x, stride, split), *_float_args(p)]
    return Launch(kernel, (columns, _ceil(n_out, rows_per_block), batches), (128, 1, 1), 0, args)


def _matrix_launch(p: _Product, x: int, stride: int) -> Launch:
    tile_columns = 64 if p.is_float else 128
    columns = p.n_tokens if p.is_by_expert else p.max_columns  # an expert gets a token once at most
    grid = (
        _ceil(p.up.shape[1], 32 if p.gate else 64),
        _ceil(columns, tile_columns),
        p.n_experts if p.is_by_expert else p.c.op.dst.shape[2],
    )
    return Launch(f"matmul_{type_name(p.up.type_id)}", grid, (256, 1, 1), 0, [p.pack(x, stride, 1), *_float_args(p)])


def _dense(c: _Context) -> _Product:
    op = c.op
    if op.kind == "mul_mat_up_gate":
        up, gate, x, up_bias, gate_bias = op.src
        assert up is not None and x is not None
        return _Product(c, up, gate, op.ip[0], x, up_bias, gate_bias, None, op.ip[1], op.ip[2])
    up, x, bias = (*op.src, None)[:3]
    assert up is not None and x is not None
    tokens = op.ip[1] if op.ip[1] > 0 else (0 if op.dst.dynamic_dim == 1 else op.dst.shape[1])
    return _Product(c, up, None, op.ip[0], x, bias, None, None, tokens)


def _by_expert(c: _Context) -> _Product:
    op = c.op
    fmt, tokens, third, n_used, n_experts = op.ip
    if op.kind == "mul_mat_id_up_gate":
        up, gate, x, groups, up_bias, gate_bias = op.src
        assert up is not None and x is not None
        return _Product(c, up, gate, fmt, x, up_bias, gate_bias, groups, tokens, third, n_used, n_experts, 0)
    up, x, groups, bias = op.src
    assert up is not None and x is not None
    return _Product(c, up, None, fmt, x, bias, None, groups, tokens, 0, n_used, n_experts, third)


_lowers("mul_mat", "mul_mat_up_gate")(lambda c: _product(_dense(c)))
_lowers("mul_mat_id", "mul_mat_id_up_gate")(lambda c: _product(_by_expert(c)))


# --- attention ------------------------------------------------------------------------------------------------------


def _attention_struct(c: _Context, partials: int, n_parts: int) -> bytes:
    """ikpy::cuda::Attention."""
    q, k, v, mask, sinks, k1, ranges = c.op.src
    assert q is not None and k is not None and v is not None
    views = b"".join(view(value, c.address) for value in (q, k, k1, v, c.op.dst))
    addresses = [_optional(value, c.address) for value in (mask, ranges, sinks)]
    mask_stride = mask.strides[1] if mask is not None else 0
    types = [k.type_id, k1.type_id if k1 is not None else 0, v.type_id]
    head = struct.pack("<5Qq2f", *addresses, partials, c.address(RUNTIME), mask_stride, *c.op.fp[:2])
    return views + head + struct.pack("<4i", *types, n_parts)


# (dk, dv) -> (rows of the kernel for many rows, cells per tile of both kernels, threads of both kernels). The kernel
# for few rows takes 16. Values of 576 / 512 are a part of the key rows.
_FLASH = {
    (64, 64): (64, (64, 64), (128, 128)),
    (80, 80): (64, (64, 64), (128, 128)),
    (96, 96): (64, (64, 64), (128, 128)),
    (112, 112): (64, (64, 64), (128, 128)),
    (128, 128): (64, (64, 64), (128, 128)),
    (192, 128): (64, (64, 32), (128, 128)),
    (256, 256): (64, (32, 32), (128, 128)),
    (576, 512): (32, (32, 32), (128, 256)),
}
_FEW_ROWS = 16
# Parts of the cells: enough blocks for the largest devices (132 multiprocessors, two blocks each), none of fewer than
# 256 cells.
_WANTED_BLOCKS, _MIN_PART_CELLS, _MAX_PARTS = 264, 256, 64


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

    @property
    def kernel(self) -> str:
        return f"flash{self.rows}_{self.dk}_{self.dv}"

    @property
    def shared_bytes(self) -> int:
        """As ikpy::cuda::Flash::kBytes."""
        key_row = _ceil(self.dk, 32) * 32 + 8
        values = 0 if self.v_column >= 0 else self.cells * (self.dv + 8)
        probabilities = 0 if self.rows == 64 else self.rows * (self.cells + 8)
        return 2 * (self.rows * key_row + self.cells * key_row + values + probabilities)


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


def flash_shared_bytes(kernel: str) -> int:
    """Dynamic shared memory of a flash attention kernel, 0 for other kernels."""
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


def _flash(op: Node, shared_limit: int) -> _Flash | None:
    """The flash kernel for an attention op, None if only the plain one fits."""
    q, k, v, _, _, k1, _ = op.src
    assert q is not None and k is not None and v is not None
    dk, dv = k.shape[0] + (k1.shape[0] if k1 is not None else 0), v.shape[0]
    if (dk, dv) not in _FLASH or k.shape[0] % 8:
        return None
    if any(x is not None and x.type_id == F16 and not _is_aligned(x) for x in (k, v, k1)):
        return None
    column = _v_column(k, k1, v) if dk == 576 else -1
    if dk == 576 and column < 0:
        return None
    many, cells, threads = _FLASH[dk, dv]
    n_rows = q.shape[1] // k.shape[1] * q.shape[2]
    choices = [(_FEW_ROWS, 0)] if n_rows <= _FEW_ROWS else [(many, 1), (_FEW_ROWS, 0)]
    for rows, choice in choices:
        row_tiles, kv_heads = _ceil(n_rows, rows), k.shape[1]
        parts = min(_ceil(_WANTED_BLOCKS, row_tiles * kv_heads), k.shape[2] // _MIN_PART_CELLS, _MAX_PARTS)
        flash = _Flash(dk, dv, rows, cells[choice], threads[choice], column, row_tiles, kv_heads, max(1, parts))
        if flash.shared_bytes <= shared_limit - 1024:  # some is static
            return flash
    return None


@_lowers("attention")
def _attention(c: _Context) -> list[Launch]:
    q, v = c.source(0), c.source(2)
    flash = _flash(c.op, c.shared_limit)
    if flash is None:
        dk = q.shape[0]
        return [
            Launch(
                "attention_any",
                (q.shape[1], q.shape[2], 1),
                (128, 1, 1),
                4 * (dk + 4 * v.shape[0]),
                [_attention_struct(c, 0, 1)],
            )
        ]
    partials = c.address(WORK) if flash.n_parts > 1 else 0
    struct_bytes = _attention_struct(c, partials, flash.n_parts)
    grid = (flash.row_tiles, flash.kv_heads, flash.n_parts)
    args = [struct_bytes, i32(max(flash.v_column, 0))]
    launches = [Launch(flash.kernel, grid, (flash.threads, 1, 1), flash.shared_bytes, args)]
    if flash.n_parts > 1:
        block = (min(256, _ceil(flash.dv, 32) * 32), 1, 1)
        launches.append(Launch("flash_combine", (q.shape[1], q.shape[2], 1), block, 0, [struct_bytes]))
    return launches


# --- what can be lowered --------------------------------------------------------------------------------------------


@cache
def weight_types() -> frozenset[str]:
    """Names (as in the table of types) of the weight types that the kernels take."""
    names = {row.name for row in registry.all_types() if row.is_quantized and not row.activation_only}
    return frozenset((names | FLOAT_WEIGHTS) - {"i2_s"})


def _check_copy(op: Node) -> str | None:
    src, dst = op.src[0], op.dst
    assert src is not None
    if src.type_id != F32:
        if dst.type_name not in ("f32", "f16", "bf16"):
            return f"copies from {src.type_name} to {dst.type_name} have no CUDA kernel"
        return _check_weight(src)
    return None if dst.type_name in KV_TYPES else f"copies to {dst.type_name} have no CUDA kernel"


def _check_weight(weight: Value | None) -> str | None:
    assert weight is not None
    if weight.type_name in weight_types():
        return None
    return f"type {weight.type_name} has no CUDA kernels"


def _check_route(op: Node) -> str | None:
    logits = op.src[0]
    assert logits is not None
    if logits.shape[0] > MAX_EXPERTS or op.ip[3] > 64:
        return f"routing over {logits.shape[0]} experts in {op.ip[3]} groups (at most {MAX_EXPERTS} in 64)"
    return None


def _check_attention(op: Node) -> str | None:
    q, k, v, _, _, k1, _ = op.src
    assert q is not None and k is not None and v is not None
    for value in (k, v, k1):
        if value is not None and value.type_name not in KV_TYPES:
            return f"cache type {value.type_name} has no CUDA attention kernel"
    if q.shape[0] > 1024 or v.shape[0] > 1024:
        return f"head size {max(q.shape[0], v.shape[0])} is above 1024"
    if q.shape[2] > MAX_GRID_YZ:
        return f"{q.shape[2]} tokens at once are above {MAX_GRID_YZ}"
    return None


def supports(op: Node) -> str | None:
    """None, or why the op must run on the CPU (one clause, for the log)."""
    if op.kind not in _LOWERINGS:
        return f"op {op.kind} has no CUDA kernel"
    if op.kind == "copy":
        return _check_copy(op)
    if op.kind in ("get_rows", "mul_mat", "mul_mat_up_gate", "mul_mat_id", "mul_mat_id_up_gate"):
        return _check_weight(op.src[0])
    if op.kind == "moe_route":
        return _check_route(op)
    if op.kind == "hadamard" and op.dst.shape[0] > 8192:
        return f"Hadamard transform of {op.dst.shape[0]} columns (at most 8192)"
    if op.kind in ("kv_store", "kv_shift") and op.dst.type_name not in KV_TYPES:
        return f"cache type {op.dst.type_name} has no CUDA kernel"
    return _check_attention(op) if op.kind == "attention" else None


def work_bytes(op: Node, shared_limit: int = SHARED_LIMIT) -> int:
    """Bytes of scratch memory (WORK) that the launches of an op need, with the shared_limit given to ``lower``."""
    if op.kind in ("mul_mat", "mul_mat_up_gate", "mul_mat_id", "mul_mat_id_up_gate"):
        weight = op.src[0]
        assert weight is not None
        if weight.type_name not in FLOAT_WEIGHTS and op.ip[0] != ACT_Q8:
            c = _Context(op, lambda _: 0, shared_limit)
            p = _by_expert(c) if "_id" in op.kind else _dense(c)
            return _x_rows(p) * act_row_bytes(ACT_Q8, weight.shape[0])
    if op.kind == "attention":
        flash, q = _flash(op, shared_limit), op.src[0]
        assert q is not None
        if flash is not None and flash.n_parts > 1:
            return flash.n_parts * q.shape[1] * q.shape[2] * (flash.dv + 2) * 4
    return 0


# --- kernel files ---------------------------------------------------------------------------------------------------

# Kernel file of every weight type that has kernels of its own.
_WEIGHT_FILES: dict[str, Sequence[str]] = {
    "weights_legacy": ("q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q8_0", "q8_kv", "iq4_nl", "mxfp4"),
    "weights_small": ("q1_0_g128", "iq1_bn", "iq2_bn", "tq1_0", "tq2_0"),
    "weights_kquants": ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    "weights_iqk": ("iq4_xs", "iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k"),
    "weights_iqk_rows": ("iq2_ks", "iq3_ks", "iq4_ks", "iq5_ks", "iq4_kss", "iq2_kl"),
    "weights_grids": ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m"),
    "weights_grids_r4": (
        "iq2_xxs_r4",
        "iq2_xs_r4",
        "iq2_s_r4",
        "iq3_xxs_r4",
        "iq3_s_r4",
        "iq1_s_r4",
        "iq1_m_r4",
    ),
    "weights_trellis": ("iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt"),
    "weights_legacy_rn": (
        "q4_0_r8",
        "q5_0_r4",
        "q6_0_r4",
        "q8_0_r8",
        "q8_kv_r8",
        "iq4_nl_r4",
        "mxfp4_r8",
        "q4_0_4x4",
        "q4_0_4x8",
        "q4_0_8x8",
        "iq2_bn_r4",
    ),
    "weights_super_r4": ("q2_k_r4", "q3_k_r4", "q4_k_r4", "q5_k_r4", "q6_k_r4", "q8_k_r8", "q8_k_r16"),
    "weights_iqk_r4": ("iq4_xs_r8", "iq2_k_r4", "iq3_k_r4", "iq4_k_r4", "iq5_k_r4", "iq4_ks_r4", "iq5_ks_r4"),
}
_KERNEL_FILES = {
    "unary_f32": "elementwise",
    "binary_f32": "elementwise",
    "copy_f32": "elementwise",
    "attention_temperature": "elementwise",
    "rms_norm": "norm",
    "rms_norm_q8": "norm",
    "layer_norm": "norm",
    "rope_table": "rope",
    "rope": "rope",
    "kq_mask": "kv_cache",
    "kv_store": "kv_cache",
    "kv_shift": "kv_cache",
    "hadamard_rows": "kv_cache",
    "copy_to_type": "kv_cache",
    "moe_route": "moe",
    "moe_offsets": "moe",
    "moe_entries": "moe",
    "moe_combine": "moe",
    "act_stats": "statistics",
    "act_similarity": "statistics",
    "act_prepare_q8": "act_prepare",
    "act_prepare_float": "act_prepare",
    "rows_float": "float",
    "attention_any": "attention_any",
}
_FILE_OF_TYPE = {name: file for file, names in _WEIGHT_FILES.items() for name in names}


def kernel_file(kernel: str) -> str:
    """Stem of the .cu file that defines a kernel."""
    if kernel in _KERNEL_FILES:
        return _KERNEL_FILES[kernel]
    if kernel.startswith("flash"):
        short = all(f"_{dk}_" not in kernel for dk in (192, 256, 576)) and kernel != "flash_combine"
        return "flash_heads" if short else "flash_long"
    return _FILE_OF_TYPE.get(kernel.partition("_")[2], "float")
