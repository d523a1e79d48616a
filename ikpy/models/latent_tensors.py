"""Tensors of latent attention that a file may lack and the loader derives."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from ikpy._native import core
from ikpy.graph.ir import PLANNED_ADDRESS, Value, external
from ikpy.models.factors import multiplied
from ikpy.quants import registry

F32, F16, BF16, Q8_0 = 0, 1, 30, 8
PLAIN = (F32, F16, BF16)


@dataclass(frozen=True)
class LatentSizes:
    """Heads of a layer; elements of a key head, of those the rotated ones, and of a value head; of a latent."""

    heads: int
    k: int
    rotated: int
    v: int
    rank: int

    @property
    def nope(self) -> int:
        """Elements of a query or key head that are not rotated."""
        return self.k - self.rotated

    def heads_per_expansion(self, n_kv: int, budget: int) -> int:
        """Heads whose keys and values of n_kv cells are computed at a time under the -amb budget in MiB."""
        need = self.heads * (self.nope + self.v) * n_kv * 4 >> 20
        if budget == 0 or need <= max(budget, 128):
            return self.heads
        for parts in range(2, self.heads):
            if self.heads % parts == 0 and need // parts <= max(budget, 128):
                return self.heads // parts
        return 1


def to_float(value: Value) -> np.ndarray:
    """A contiguous weight [n, ...] as float32 in numpy order (reversed shape), times its factors."""
    kind = registry.by_id(value.type_id)
    n_rows = value.shape[1] * value.shape[2] * value.shape[3]
    nbytes = kind.row_nbytes(value.shape[0]) * n_rows
    flat = core.dequantize(_bytes(value, nbytes), value.type_id, value.shape[0], n_rows, True)
    numbers = flat.reshape(value.shape[3], value.shape[2], value.shape[1], value.shape[0])[0]
    factor = value.buffer.factor
    if factor is None:
        return numbers
    return multiplied(numbers, factor if isinstance(factor, float) else _bytes(factor, factor.buffer.nbytes).view("f4"))


def _bytes(value: Value, nbytes: int) -> np.ndarray:
    """Bytes u8 of a value from its first one on."""
    assert value.buffer.address is not None
    first = value.buffer.address + value.offset
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(first))


def is_planned(*values: Value) -> bool:
    """Whether values have no memory: only the header of their file was read."""
    return any(value.buffer.address == PLANNED_ADDRESS for value in values)


def planned(type_id: int, name: str, *shape: int) -> Value:
    """A tensor without memory, contiguous."""
    return external(PLANNED_ADDRESS, None, type_id, shape, name, "weight")


def store(values: np.ndarray, type_id: int, name: str) -> Value:
    """float32 [.., rows, n] encoded as F32, F16, BF16 or Q8_0 in memory of its own."""
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    encoded = rows.view(np.uint8) if type_id == F32 else core.quantize(rows, type_id, None, 1)
    shape = tuple(reversed(values.shape))
    return external(encoded.ctypes.data, encoded, type_id, shape, name, "weight")


def _derived_type(types: set[int], n: int) -> int:
    """The type of tensors that all have the same plain one, else Q8_0, or F16 for rows of n that Q8_0 cannot hold."""
    if len(types) == 1 and types <= set(PLAIN):
        return next(iter(types))
    return F16 if n % registry.by_id(Q8_0).block_elements else Q8_0


def derive_k_b_v_b(kv_b: Value, sizes: LatentSizes) -> tuple[Value, Value]:
    """attn_k_b [dn, rkv, H]: the K rows transposed per head; attn_v_b [rkv, dv, H]: the V rows, as a view."""
    rkv, dn, dv, n_head = sizes.rank, sizes.nope, sizes.v, sizes.heads
    k_type = _derived_type({kv_b.type_id}, dn)
    if is_planned(kv_b):
        k_b = planned(k_type, "attn_k_b", dn, rkv, n_head)
    else:
        per_head = to_float(kv_b)[0].reshape(n_head, dn + dv, rkv)
        k_b = store(per_head[:, :dn].transpose(0, 2, 1), k_type, "attn_k_b")
    row = kv_b.strides[1]
    strides = (kv_b.strides[0], row, (dn + dv) * row, (dn + dv) * n_head * row)
    v_b = Value(kv_b.buffer, kv_b.type_id, (rkv, dv, n_head, 1), strides, kv_b.offset + dn * row, name="attn_v_b")
    return k_b, v_b


def derive_kv_b(k_b: Value, v_b: Value, sizes: LatentSizes) -> Value:
    """attn_kv_b [rkv, H*(dn+dv)]: per head the transposed attn_k_b rows, then the attn_v_b rows."""
    rkv, dn, dv, n_head = sizes.rank, sizes.nope, sizes.v, sizes.heads
    type_id = _derived_type({k_b.type_id, v_b.type_id}, rkv)
    if is_planned(k_b, v_b):
        return planned(type_id, "attn_kv_b", rkv, n_head * (dn + dv))
    keys = to_float(k_b).transpose(0, 2, 1)
    joined = np.concatenate([keys, to_float(v_b)], axis=1).reshape(n_head * (dn + dv), rkv)
    return store(joined, type_id, "attn_kv_b")
