"""Shapes that ops may have: what the graph's builder asks, and numbers of rows, cells and slots within their tables.

Records of a client are checked by these before they run; kernels trust them. Ops without a rule are held to the memory
of their tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ikpy._native import core
from ikpy.backends.remote.protocol import ProtocolError
from ikpy.graph.ir import F16, F32, I32, I64
from ikpy.quants import registry

Shape = tuple[int, int, int, int]
BATCHES = (*range(1, 65), 128, 256, 512, 1024, 4096)
SAME = ("unary", "scale", "softcap", "hadamard")
BROADCAST = ("add", "mul")
NORMS = ("rms_norm", "layer_norm")
SLOTS = {"causal_conv": (2, 3), "ngram_rows": (2, 3), "gated_delta_rule": (5, 6), "ssm_scan": (6, 7), "wkv": (6, 7)}
"""Kinds with states, and which of their sources these and their slots are."""
NEEDED = {
    "mul_mat": 2,
    "mul_mat_up_gate": 3,
    "mul_mat_id": 3,
    "mul_mat_id_up_gate": 4,
    "get_rows": 2,
    "add": 2,
    "mul": 2,
    "gated_unary": 2,
    "rope": 2,
    "kv_store": 2,
    "kv_shift": 2,
    "attention": 4,
    "kq_mask": 5,
    "moe_route": 1,
    "choose_cells": 5,
    "chosen_mask": 2,
    "chosen_list": 2,
    "stretch_cells": 6,
    "choose_blocks": 6,
    "compress_cells": 8,
    "causal_conv": 4,
    "ngram_rows": 4,
    "gated_delta_rule": 7,
    "ssm_scan": 8,
    "wkv": 4,
}
"""How many of their sources ops cannot do without."""


class Tensor(NamedTuple):
    """A tensor of a program: its type, shape and bytes from the first one to the last. data: its address."""

    type_id: int
    shape: Shape
    nbytes: int
    data: int
    strides: Shape

    @property
    def n_elements(self) -> int:
        """Product of the shape."""
        a, b, c, d = self.shape
        return a * b * c * d


class Op(NamedTuple):
    """An op of a program."""

    kind: str
    dst: Tensor
    src: Sequence[Tensor | None]
    ip: Sequence[int]
    fp: Sequence[float] = ()
    cells: tuple[int, int] = (0, 0)
    """Runs only with more attended cells than the first number and at most the second, 0: no limit."""

    @property
    def written(self) -> list[Tensor]:
        """What it writes: a mask comes with the cells that each token sees."""
        seen = self.src[4] if self.kind == "kq_mask" else None
        return [self.dst] if seen is None else [self.dst, seen]


class Range(NamedTuple):
    """Numbers i32 that must lie within low .. high - 1 whenever a program runs."""

    numbers: np.ndarray
    low: int
    high: int

    def check(self) -> None:
        """ProtocolError if they do not."""
        if self.numbers.min() < self.low or self.numbers.max() >= self.high:
            raise ProtocolError(f"numbers of rows or cells outside of {self.low} .. {self.high - 1}")


def check(op: Op) -> None:
    """ProtocolError for an op whose tensors do not fit each other."""
    rule, n_needed = RULES.get(op.kind), NEEDED.get(op.kind, 1)
    if None in op.src[:n_needed] or (rule is not None and not rule(op)):
        shapes = [tensor.shape for tensor in (op.dst, *op.src) if tensor is not None]
        raise ProtocolError(f"{op.kind} of shapes {shapes} and parameters {list(op.ip[:6])}")


def ranges(op: Op) -> Iterator[tuple[Tensor, int, int]]:
    """Sources that hold numbers, with the least that is allowed and the one behind the largest."""
    table, found, low, high = op.dst, None, -1, 0
    if op.kind == "get_rows" and op.src[0]:
        table, found = op.src[0], op.src[1]
        high = table.shape[1]
    elif op.kind == "kv_store":
        found, high = op.src[1], op.dst.shape[2]
    elif op.kind == "attention" and op.src[1]:
        found, low, high = op.src[6], 0, op.src[1].shape[2] + 1
    elif op.kind == "moe_group":
        found, high = op.src[0], op.ip[0]
    elif op.kind in SLOTS:
        state, slots = SLOTS[op.kind]
        known = op.src[state]
        if known is not None:
            found, low, high = op.src[slots], 0, max(known.shape[1:])
    if found is not None:
        yield found, low, high


@cache
def formats(type_id: int) -> frozenset[int]:
    """Formats that kernels for weights of a type read; none if there is no such product."""
    try:
        return frozenset(core.activation_format(type_id, n, of_expert) for n in BATCHES for of_expert in (False, True))
    except (ValueError, RuntimeError):
        return frozenset()


@cache
def all_formats() -> frozenset[int]:
    """Formats that activations are prepared in."""
    kinds = [kind.id for kind in registry.all_types()]
    return frozenset[int]().union(*(formats(type_id) for type_id in kinds))


def _holds(prepared: Tensor | None, fmt: int, n_in: int, n_rows: int, n_batch: int) -> bool:
    return prepared is not None and prepared.nbytes >= core.activation_nbytes(fmt, n_in, n_rows, n_batch)


def _has(values: Tensor | None, n: int) -> bool:
    """Whether a bias is not there, or long enough."""
    return values is None or (values.type_id == F32 and values.shape[0] >= n)


def _act_prepare(op: Op) -> bool:
    x = op.src[0]
    if x is None or x.type_id != F32 or op.ip[0] not in all_formats():
        return False
    return _holds(op.dst, op.ip[0], x.shape[0], x.shape[1], x.shape[2] * x.shape[3])


def _mul_mat(op: Op) -> bool:
    weight, x, bias = op.src[:3]
    if weight is None or op.ip[0] not in formats(weight.type_id) or op.dst.shape[0] != weight.shape[1]:
        return False
    _, n_rows, n_batch, more = op.dst.shape
    n_rows = max(n_rows, op.ip[1])
    return _holds(x, op.ip[0], weight.shape[0], n_rows, n_batch * more) and _has(bias, weight.shape[1])


def _mul_mat_up_gate(op: Op) -> bool:
    up, gate, x = op.src[:3]
    if up is None or gate is None or (up.type_id, up.shape) != (gate.type_id, gate.shape):
        return False
    if op.ip[0] not in formats(up.type_id) or op.dst.shape[0] != up.shape[1]:
        return False
    n_rows = max(op.dst.shape[1], op.ip[1])
    return _holds(x, op.ip[0], up.shape[0], n_rows, 1) and all(_has(b, up.shape[1]) for b in op.src[3:5])


def _experts(op: Op, weight: Tensor | None, x: Tensor | None, groups: Tensor | None, per_slot: bool) -> bool:
    if weight is None or groups is None or op.ip[0] not in formats(weight.type_id):
        return False
    (k, n, n_expert), (n_out, n_used, n_tokens) = weight.shape[:3], op.dst.shape[:3]
    if (n_out, n_tokens, n_used, n_expert) != (n, op.ip[1], op.ip[3], op.ip[4]):
        return False
    n_rows = n_used * n_tokens if per_slot else n_tokens
    return groups.nbytes >= 4 * (n_expert + 1 + n_used * n_tokens) and _holds(x, op.ip[0], k, n_rows, 1)


def _mul_mat_id(op: Op) -> bool:
    weight, x, groups = op.src[:3]
    return _experts(op, weight, x, groups, bool(op.ip[2]))


def _mul_mat_id_up_gate(op: Op) -> bool:
    up, gate, x, groups = op.src[:4]
    if up is None or gate is None or (up.type_id, up.shape) != (gate.type_id, gate.shape):
        return False
    return _experts(op, up, x, groups, False)


def _moe_group(op: Op) -> bool:
    ids = op.src[0]
    if ids is None or ids.type_id != I32 or not 0 < op.ip[0] < 1 << 20:
        return False
    return op.dst.nbytes >= 4 * (op.ip[0] + 1 + ids.shape[0] * ids.shape[1])


def _get_rows(op: Op) -> bool:
    table, ids = op.src[:2]
    if table is None or ids is None or ids.type_id != I32:
        return False
    return op.dst.shape[:2] == (table.shape[0], ids.shape[0])


def _same(op: Op) -> bool:
    """Element by element."""
    return op.src[0] is not None and op.src[0].shape == op.dst.shape and op.src[0].type_id == op.dst.type_id == F32


def _copy(op: Op) -> bool:
    return op.src[0] is not None and op.src[0].n_elements == op.dst.n_elements


def _gated(op: Op) -> bool:
    return all(x is not None and x.shape == op.dst.shape for x in op.src[:2])


def _broadcast(op: Op) -> bool:
    b = op.src[1]
    return _same(op) and b is not None and all(n in (1, m) for n, m in zip(b.shape, op.dst.shape, strict=True))


def _norm(op: Op) -> bool:
    return _same(op) and all(_has(weight, op.dst.shape[0]) for weight in op.src[1:2])


def _attention(op: Op) -> bool:
    q, keys, values = op.src[:3]
    if q is None or keys is None or values is None:
        return False
    heads, n_tokens = q.shape[1:3]
    fits = op.dst.shape[:3] == (values.shape[0], heads, n_tokens) and keys.shape[1:3] == values.shape[1:3]
    mask, second = op.src[3], op.src[5]
    width = keys.shape[0] + (second.shape[0] if second else 0)
    seen = mask is not None and mask.type_id == F16 and mask.shape[1] >= n_tokens
    fits = fits and seen and q.shape[0] == width and heads % keys.shape[1] == 0 and op.ip[1] > 0
    return fits and _has(op.src[4], heads) and _sees(op, n_tokens, keys.shape[2]) and _distances(op)


def _sees(op: Op, n_tokens: int, n_cells: int) -> bool:
    """Whether the cells that tokens see, and where tokens and cells are, are known of all of them."""
    counts = {6: 2 * n_tokens, 9: n_cells, 10: n_tokens}
    found = [(op.src[i], n) for i, n in counts.items() if op.src[i] is not None]
    return all(x is not None and x.type_id == I32 and x.nbytes >= 4 * n for x, n in found)


def _distances(op: Op) -> bool:
    """Whether scores that depend on distances have what they need: positions, and biases where there are no slopes."""
    biases, cell_pos, pos = op.src[8:11]
    slopes = op.fp[2] != 0
    if (cell_pos is None) != (pos is None) or (slopes and cell_pos is None):
        return False
    if cell_pos is None or slopes:
        return True
    return biases is not None and biases.type_id == F32 and biases.shape[1] >= op.dst.shape[1]


def _rope(op: Op) -> bool:
    x, table = op.src[:2]
    if x is None or table is None or x.shape != op.dst.shape or table.shape[0] != op.ip[0]:
        return False
    return 0 <= op.ip[2] <= x.shape[0] - table.shape[0] and table.shape[1] >= x.shape[2]


def _kq_mask(op: Op) -> bool:
    cell_pos, cell_seq, pos, seq, ranges_ = op.src[:5]
    if cell_pos is None or cell_seq is None or pos is None or seq is None or ranges_ is None:
        return False
    more = op.src[5].shape[0] if op.src[5] else 0
    n_cells, n_tokens = cell_pos.shape[0], pos.shape[0]
    fits = op.dst.shape[:2] == (n_cells + more, n_tokens) and ranges_.shape[:2] == (2, n_tokens)
    fits = fits and op.cells == (0, 0)  # attention trusts what it writes
    types = cell_pos.type_id, cell_seq.type_id, pos.type_id, seq.type_id
    return fits and types == (I32, I64, I32, I32) and cell_seq.shape[0] == n_cells and seq.shape[0] == n_tokens


def _kv_store(op: Op) -> bool:
    x, cells = op.src[:2]
    if x is None or cells is None or cells.type_id != I32:
        return False
    return x.shape[:2] == op.dst.shape[:2] and cells.shape[0] >= x.shape[2]


RULES: dict[str, Callable[[Op], bool]] = {
    "act_prepare": _act_prepare,
    "mul_mat": _mul_mat,
    "mul_mat_up_gate": _mul_mat_up_gate,
    "mul_mat_id": _mul_mat_id,
    "mul_mat_id_up_gate": _mul_mat_id_up_gate,
    "moe_group": _moe_group,
    "get_rows": _get_rows,
    "copy": _copy,
    "gated_unary": _gated,
    "attention": _attention,
    "kv_store": _kv_store,
    "rope": _rope,
    "kq_mask": _kq_mask,
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(BROADCAST, _broadcast),
    **dict.fromkeys(NORMS, _norm),
}
