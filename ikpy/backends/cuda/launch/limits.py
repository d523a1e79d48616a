"""What a launch may ask of a device. A driver refuses more, and so do the emulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ikpy.backends.cuda.launch.base import SHARED_LIMIT, Dim3

# CUDA programming guide, "Technical Specifications per Compute Capability".
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_PARAMETER_BYTES = 4096
# Most shared memory of a block, with opting in; other devices from sm_80 on have at least SHARED_LIMIT.
_SHARED_KIB = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
# Of dynamic shared memory beyond the default, some must be left for static one.
DEFAULT_SHARED_BYTES, STATIC_SHARED_BYTES = 48 << 10, 1024

# Threads per block as launched, at most, by the beginning of a kernel's name; the first one that fits counts.
_BLOCK_THREADS = {
    "act_prepare_q8": 128,
    "act_prepare_float": 256,
    "attention_any": 128,
    "attention_temperature": 128,
    "binary_f32": 256,
    "block_scores": 128,
    "causal_conv": 128,
    "channel_scan": 128,
    "chosen_list": 32,
    "chosen_mask": 256,
    "compress_cells": 128,
    "clear_blocks": 256,
    "copy_": 256,
    "flash_combine": 256,
    "flash32": 256,
    "flash": 128,
    "gated_delta_rule": 128,
    "gather_cells": 128,
    "gemm_bf16": 256,
    "gemm_wgmma": 288,
    "hadamard_rows": 128,
    "hyper_weights": 32,
    "hyper_": 128,
    "index_scores": 128,
    "kq_mask": 256,
    "kv_shift": 32,
    "kv_store": 128,
    "matmul": 256,
    "matvec": 128,
    "moe_combine": 128,
    "moe_entries": 128,
    "moe_group": 256,
    "moe_route": 32,
    "rope": 128,
    "rows_": 256,
    "ssm_scan": 128,
    "stretch_cells": 1024,
    "unary_f32": 256,
    "wgmma_": 256,
    "wkv": 128,
}


def block_threads(kernel: str) -> int:
    """Most threads that a block of a kernel is launched with."""
    return next((n for name, n in _BLOCK_THREADS.items() if kernel.startswith(name)), MAX_THREADS)


def shared_bytes(compute_capability: tuple[int, int]) -> int:
    """Most shared memory that a block may have on a device."""
    kib = _SHARED_KIB.get(compute_capability)
    return kib << 10 if kib else SHARED_LIMIT


def shared_fault(dynamic_bytes: int, compute_capability: tuple[int, int]) -> str | None:
    """Why a device has not that much dynamic shared memory for a block, or None."""
    most = shared_bytes(compute_capability)
    if dynamic_bytes > most - (STATIC_SHARED_BYTES if dynamic_bytes > DEFAULT_SHARED_BYTES else 0):
        return f"{dynamic_bytes} bytes of dynamic shared memory, of {most} that a block may have in all"
    return None


def geometry_fault(kernel: str, grid: Dim3, block: Dim3) -> str | None:
    """Why a kernel cannot be launched with these sizes, or None."""
    for what, sizes, most in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
        if not all(0 < n <= limit for n, limit in zip(sizes, most, strict=True)):
            return f"{what} {sizes}: at most {most}, and nothing empty"
    threads = prod(block)
    return f"{threads} threads per block: at most {block_threads(kernel)}" if threads > block_threads(kernel) else None


def argument_fault(args: Sequence[bytes], parameters: Sequence[tuple[int, int]]) -> str | None:
    """Why packed arguments are not the parameters (bytes, alignment) of a kernel, or None."""
    sizes = [len(value) for value in args]
    if sizes != [nbytes for nbytes, _ in parameters]:
        return f"arguments of {sizes} bytes for parameters of {[nbytes for nbytes, _ in parameters]}"
    if sum(sizes) > MAX_PARAMETER_BYTES:
        return f"{sum(sizes)} bytes of arguments: at most {MAX_PARAMETER_BYTES}"
    return None


def offsets(parameters: Sequence[tuple[int, int]]) -> list[int]:
    """Where a kernel reads its parameters (bytes, alignment) in the parameter buffer; last, the buffer's end."""
    found, end = [], 0
    for nbytes, alignment in parameters:
        start = -(-end // alignment) * alignment
        found.append(start)
        end = start + nbytes
    return [*found, end]
