"""How evenly the products of one token are divided among many threads, counted, and the work memory of attention.

    python -m benchmarks.thread_balance [--threads 16,64,128,256]

First table: rows of a layer's matrices that the busiest thread multiplies, over the mean, by whole blocks of 32 rows
(16 with a gate) and by the items of ``kernels/matmul/matmul.cpp``, whose rule is repeated here. Second: ranges of cells
times tiles of heads that a token of DeepSeek-V3 has on CPUs without a tile unit (``flash_latent_problem.cpp``), as
the share of the threads' time that is used. Third: bytes of work memory that a batch of 512 tokens plans for. Nothing
is timed.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.attention import SHAPES, TYPES, Layer
from benchmarks.reference_attention import row_nbytes

MANY_THREADS = 17
# Name: rows, matrices that a token meets, whether there is a gate.
MATRICES = {
    "DeepSeek-V3": {
        "q_a": (1536, 1, False),
        "q_b": (24576, 1, False),
        "kv_a": (576, 1, False),
        "k_b": (512, 128, False),
        "v_b": (128, 128, False),
        "output": (7168, 1, False),
        "router": (256, 1, False),
        "experts up": (2048, 8, True),
        "experts down": (7168, 8, False),
        "shared up": (2048, 1, True),
    },
    "Qwen3-235B": {
        "q": (8192, 1, False),
        "k, v": (512, 1, False),
        "output": (4096, 1, False),
        "router": (128, 1, False),
        "experts up": (1536, 8, True),
        "experts down": (4096, 8, False),
    },
    "Qwen3-30B": {
        "q": (4096, 1, False),
        "k, v": (512, 1, False),
        "output": (2048, 1, False),
        "router": (128, 1, False),
        "experts up": (768, 8, True),
        "experts down": (2048, 8, False),
    },
    "Llama-70B": {
        "q, output, down": (8192, 1, False),
        "k, v": (1024, 1, False),
        "up": (28672, 1, True),
    },
}


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


def rows_for_threads(rows: int, matrices: int, block: int, threads: int) -> int:
    """Rows per item, as the function of this name in matmul.cpp chooses for types without interleaved rows."""

    def busiest(n: int) -> int:
        return ceil_div(matrices * ceil_div(rows, n), threads) * (n + 1)

    sizes = [block >> i for i in range(4) if block >> i >= 4]
    return min(sizes, key=busiest) if threads >= MANY_THREADS else block


def imbalance(rows: int, matrices: int, item: int, threads: int) -> float:
    """Rows of the busiest thread over the mean."""
    return ceil_div(matrices * ceil_div(rows, item), threads) * item * threads / (rows * matrices)


def attention_use(cells: int, threads: int, tiled: bool) -> float:
    """Share of the threads' time that a token of 128 heads uses, 64 cells per range at least."""
    ranges = min(threads, ceil_div(cells, 64))
    per_range = ceil_div(ceil_div(cells, 64), ranges)
    sizes = range(128, 0, -16) if tiled and threads >= MANY_THREADS else [128]
    busiest = min(ceil_div(ceil_div(128, rows) * ranges, threads) * (rows + 16) for rows in sizes)
    return cells / 64 * (128 + 16) / (threads * busiest * per_range)


def work_bytes(shape_name: str, threads: int, cells: int) -> int:
    """Work memory of attention of 512 tokens over an F16 cache."""
    shape = SHAPES[shape_name]
    heads_kv, dk, dv = shape[1:]
    k, v = (np.zeros((cells, heads_kv, row_nbytes(TYPES["f16"], d)), np.uint8) for d in (dk, dv))
    layer = Layer(shape, 512, TYPES["f16"], k, None if heads_kv == 1 else v)
    return int(layer.plan.work_bytes(threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="16,64,128,256")
    counts = [int(n) for n in parser.parse_args().threads.split(",")]
    head = "".join(f" | {n}" for n in counts)
    print(f"| model | matrix{head} |\n| --- | ---{' | ---' * len(counts)} |")
    for model, matrices in MATRICES.items():
        for name, (rows, n, gate) in matrices.items():
            block = 16 if gate else 32
            cells = []
            for threads in counts:
                item = rows_for_threads(rows, n, block, threads)
                cells.append(f"{imbalance(rows, n, block, threads):.2f} -> {imbalance(rows, n, item, threads):.2f}")
            print(f"| {model} | {name} | {' | '.join(cells)} |")
    print(f"\n| cells{head} |\n| ---{' | ---' * len(counts)} |")
    for n_cells in (512, 1024, 4096, 8192, 16384, 65536):
        uses = [[attention_use(n_cells, n, tiled) for tiled in (False, True)] for n in counts]
        print(f"| {n_cells} | {' | '.join(f'{a:.2f} -> {b:.2f}' for a, b in uses)} |")
    print(f"\n| MB of work memory, 512 tokens{head} |\n| ---{' | ---' * len(counts)} |")
    for shape, n_cells in (("mla128", 163840), ("gqa128", 32768)):
        sizes = [f"{work_bytes(shape, n, n_cells) / 1e6:.0f}" for n in counts]
        print(f"| {shape}, {n_cells} cells | {' | '.join(sizes)} |")


if __name__ == "__main__":
    main()
