"""Matrix products against what the machine can do: prompt rates and generation bandwidth of every fast type.

    python -m benchmarks.matmul prompt    1e9 op/s of [2048, 8192] x --tokens, share of the dot product ceiling
    python -m benchmarks.matmul generate    1e9 bytes/s of uncached weights x 1 token, share of the read bandwidth
    python -m benchmarks.matmul cached      1e9 weights/s and bytes/s of one core with 0.3 MB of weights in its cache

Ceiling and product alternate in one process and the best of several runs counts. What can be read changes by half
within minutes where others share the memory: a product's share is that of the better of the two samples around it. The
weights of `generate` take four times the last-level cache, like the buffer of the ceiling, but at most a quarter of the
free memory. `cached` counts
the CPU time of one thread, so other load on the machine hardly matters: it shows what the arithmetic of a type costs.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import psutil

from benchmarks.matmul_plans import FAST_TYPES, Program
from benchmarks.random_weights import random_tensor
from ikpy._native import core, tier
from ikpy.graph.plan import OP_DTYPE, TENSOR_DTYPE
from ikpy.quants import by_name


def weights(name: str, k: int, n: int, *, bf16_values: bool = False) -> np.ndarray:
    """Packed bytes of a [k, n] matrix; a few random rows, repeated. ``bf16_values``: of numbers that BF16 holds."""
    rows = min(n, 64)
    if by_name(name).is_quantized:
        data = random_tensor(by_name(name), (k, rows), 0)
    else:
        values = np.random.default_rng(0).standard_normal((rows, k), np.float32)
        if bf16_values:
            values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        halves = values.astype(np.float16) if name == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        data = (values if name == "F32" else halves).view(np.uint8).reshape(-1)
    return np.resize(data, by_name(name).row_nbytes(k) * n)


def product(name: str, k: int, n: int, tokens: int, n_threads: int, *, bf16_values: bool = False) -> core.Plan:
    """A plan of one mul_mat whose activations are already prepared."""
    program = Program()
    x = np.random.default_rng(1).standard_normal((tokens, k)).astype(np.float32)
    act, fmt = program.prepared(x, name, tokens)
    # At a cache line, as in a context: numpy aligns to 16 bytes, which costs products 5 %.
    bytes_out = np.zeros(4 * tokens * n + 64, np.uint8)
    start = -bytes_out.ctypes.data % 64
    out = program.array(bytes_out[start : start + 4 * tokens * n].view(np.float32).reshape(tokens, n))
    data = weights(name, k, n, bf16_values=bf16_values)
    program.op("mul_mat", out, [program.weight(data, name, (k, n)), act], {0: fmt, 1: tokens})
    tensors, ops = np.array(program.tensors, TENSOR_DTYPE), np.array(program.ops, OP_DTYPE)
    core.run(tensors, ops[:1].copy(), 0, n_threads)
    arrays.append((program, tensors))  # the plan holds addresses only
    return core.Plan(tensors, ops[1:].copy(), ())


CACHED_BYTES = 300_000
RUNS = 50  # at a time: some virtual machines count the time of a thread in steps that are longer than one run
arrays: list[tuple[Program, np.ndarray]] = []


def generate_bytes() -> int:
    """Size of the weights that a pass of `generate` reads."""
    return min(core.uncached_bytes(), psutil.virtual_memory().available // 4)


def best_seconds(plan: core.Plan, n_threads: int, seconds: float) -> float:
    """Shortest of the runs that fit into `seconds`, at least three."""
    best, runs, end = float("inf"), 0, time.perf_counter() + seconds
    while runs < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        plan.run(0, n_threads)
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best


def cached_rate(name: str, seconds: float) -> tuple[float, float]:
    """1e9 weights/s and 1e9 bytes/s of one thread's CPU time, one token, weights in the second-level cache."""
    k = 4096
    row = by_name(name).row_nbytes(k)
    n = max(32, int(CACHED_BYTES / row) // 32 * 32)
    plan = product(name, k, n, 1, 1)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.thread_time()
        for _ in range(RUNS):
            plan.run(0, 1)
        best = min(best, (time.thread_time() - start) / RUNS)
    return 1e-9 * k * n / best, 1e-9 * row * n / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("prompt", "generate", "cached"))
    parser.add_argument("--types", default=",".join(FAST_TYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="of prompt")
    parser.add_argument("--seconds", type=float, default=1.0, help="per type")
    parser.add_argument("--bf16-values", action="store_true", help="F32 and F16 weights are numbers that BF16 holds")
    args = parser.parse_args()
    ceilings: dict[str, float] = {}
    size = f", {generate_bytes() / 2**20:.0f} MiB of weights" if args.mode == "generate" else ""
    print(f"tier {tier}, {args.threads} threads{size}")
    for name in args.types.split(","):
        arrays.clear()
        if args.mode == "cached":
            print("{:10s} {:6.1f} Gweights/s {:6.1f} GB/s".format(name, *cached_rate(name, args.seconds)), flush=True)
            continue
        kind = "int8" if by_name(name).is_quantized else "fp32"
        if core.activation_format(by_name(name).id) == 2:
            kind = "bf16"
        k, tokens = (2048, args.tokens) if args.mode == "prompt" else (4096, 1)
        kind = kind if args.mode == "prompt" else "read"
        row = by_name(name).row_nbytes(k)
        n = 8192 if args.mode == "prompt" else generate_bytes() // row // 32 * 32
        before = ceilings[kind] if kind in ceilings else core.ceiling(kind, args.threads)
        plan = product(name, k, n, tokens, args.threads, bf16_values=args.bf16_values)
        best = best_seconds(plan, args.threads, args.seconds)
        after = core.ceiling(kind, args.threads)
        ceiling = max(before, after)
        ceilings[kind] = after if kind == "read" else ceiling
        rate = 1e-9 / best * (2 * k * n * tokens if args.mode == "prompt" else row * n)
        unit = "Gop/s" if args.mode == "prompt" else "GB/s"
        print(f"{name:10s} {rate:8.1f} {unit} {100 * rate / ceiling:5.1f} % of {ceiling:.1f}", flush=True)


if __name__ == "__main__":
    main()
