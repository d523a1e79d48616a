"""Which ops the kernels can run, and the scratch memory that their launches need."""

from __future__ import annotations

from functools import cache

from ikpy.backends.cuda.launch import attention, hyper_connections, indexer, products, recurrent
from ikpy.backends.cuda.launch.base import (
    FLOAT_WEIGHTS,
    LOWERINGS,
    MAX_EXPERTS,
    MAX_GRID_YZ,
    SM_80,
    VECTOR_WARPS,
    Address,
    Launch,
    OpContext,
    Target,
    is_aligned,
)
from ikpy.backends.cuda.launch.files import weight_file
from ikpy.graph.ir import F32, Node, Value
from ikpy.quants import registry

MAX_HEAD_FLOATS = 5 * 1024
"""Of a query and of the sums of four warps, which attention_any has in shared memory."""


@cache
def weight_types() -> frozenset[str]:
    """Names (as in the table of types) of the weight types that the kernels take."""
    return frozenset(FLOAT_WEIGHTS).union(row.name for row in registry.all_types() if weight_file(row.name))


def _check_copy(op: Node) -> str | None:
    src, dst = op.src[0], op.dst
    assert src is not None
    if src.type_id != F32:
        if dst.type_name not in ("f32", "f16", "bf16"):
            return f"copies from {src.type_name} to {dst.type_name} have no CUDA kernel"
        if src.type_name not in FLOAT_WEIGHTS and not is_aligned(dst):
            return f"copies from {src.type_name} to rows off multiples of 16 bytes have no CUDA kernel"
        return _check_weight(src)
    return None if dst.type_name in registry.CACHE_TYPES else f"copies to {dst.type_name} have no CUDA kernel"


def _check_weight(weight: Value | None) -> str | None:
    assert weight is not None
    if weight.type_name in weight_types():
        return None
    return f"type {weight.type_name} has no CUDA kernels"


def _check_product(op: Node) -> str | None:
    weight = op.src[0]
    found = _check_weight(weight)
    if found or weight is None or weight.type_name in FLOAT_WEIGHTS:
        return found
    # Matrix-vector kernels have a warp for every two groups of rows, or for a group of each of two matrices.
    most = MAX_GRID_YZ * VECTOR_WARPS * registry.by_id(weight.type_id).interleave * (1 if "up_gate" in op.kind else 2)
    return f"{weight.shape[1]} rows are above {most}" if weight.shape[1] > most else None


def _check_route(op: Node) -> str | None:
    logits = op.src[0]
    assert logits is not None
    if logits.shape[0] > MAX_EXPERTS or op.ip[3] > 64:
        return f"routing over {logits.shape[0]} experts in {op.ip[3]} groups (at most {MAX_EXPERTS} in 64)"
    return None


def _check_attention(op: Node) -> str | None:
    q, k, v, _, _, k1 = op.src[:6]
    assert q is not None and k is not None and v is not None
    for value in (k, v, k1):
        if value is not None and value.type_name not in registry.CACHE_TYPES:
            return f"cache type {value.type_name} has no CUDA attention kernel"
    n_key, n_value = q.shape[0], v.shape[0]
    if n_key + 4 * n_value > MAX_HEAD_FLOATS:
        return f"heads of {n_key} and {n_value} elements take more than {MAX_HEAD_FLOATS} floats of shared memory"
    return None


def supports(op: Node) -> str | None:
    """None, or why the op must run on the CPU (one clause, for the log)."""
    if op.kind not in LOWERINGS:
        return f"op {op.kind} has no CUDA kernel"
    if op.kind == "copy":
        return _check_copy(op)
    if op.kind == "get_rows":
        return _check_weight(op.src[0])
    if op.kind in products.KINDS:
        return _check_product(op)
    if op.kind == "moe_route":
        return _check_route(op)
    if op.kind == "hadamard" and op.dst.shape[0] > 8192:
        return f"Hadamard transform of {op.dst.shape[0]} columns (at most 8192)"
    if op.kind in ("kv_store", "kv_shift") and op.dst.type_name not in registry.CACHE_TYPES:
        return f"cache type {op.dst.type_name} has no CUDA kernel"
    if op.kind in ("choose_cells", "choose_blocks"):
        return indexer.unsupported(op)
    if op.kind == "stretch_cells":
        return indexer.too_many_stretches(op)
    if op.kind in ("causal_conv", "gated_delta_rule", "ssm_scan", "wkv"):
        return recurrent.unsupported(op)
    if op.kind == "compress_cells":
        return hyper_connections.unsupported(op)
    return _check_attention(op) if op.kind == "attention" else None


def lower(op: Node, address: Address, target: Target = SM_80) -> list[Launch]:
    """The launches that carry out an op that ``supports`` accepts, in order, on one stream."""
    return LOWERINGS[op.kind](OpContext(op, address, target))


def work_bytes(op: Node, target: Target = SM_80) -> int:
    """Bytes of scratch memory (WORK) that the launches of an op need, with the target given to ``lower``."""
    if op.kind in products.KINDS:
        return products.work_bytes(op, target)
    if op.kind in ("choose_cells", "choose_blocks"):
        return indexer.work_bytes(op)
    return attention.work_bytes(op, target) if op.kind == "attention" else 0
