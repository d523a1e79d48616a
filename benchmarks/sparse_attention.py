"""Sparse attention of one layer against attention to all cells, in the absorbed form: milliseconds of one thread.

    python -m benchmarks.sparse_attention [--cells 4096,8192,32768,131072] [--types f16,q8_0] [--tokens 1]

Shapes of DeepSeek-V3.2: 128 heads on latents of 576 elements (512 of them values), 64 index heads of 128 elements.
`choice` scores all cells and chooses the best, `chosen` attends to these, `all` to every cell. Several caches of each
kind take turns, so that rows come from memory as they do between the layers of a model; CPU time, the best of all
runs, of all tokens, each of which sees all cells.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks import reference_attention as ref
from ikpy._native import core, tier
from ikpy.gguf.huge_pages import zeroed_bytes
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F16, F32, I32, Value, external
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import plan_arena
from ikpy.quants import registry

HEADS, LATENT, VALUES = 128, 576, 512
INDEX_HEADS, INDEX_SIZE = 64, 128


def value_of(array: np.ndarray, type_id: int) -> Value:
    """A value over an array, last axis first."""
    return external(array.ctypes.data, array, type_id, array.shape[::-1])


def cache(cells: int, n: int, type_id: int, seed: int) -> Value:
    """Random rows [n, 1, cells] in huge pages, as contexts have them."""
    rows = np.random.default_rng(seed).standard_normal((4096, 1, n)).astype(np.float32)
    few, _ = ref.make_cache(rows, type_id)
    memory = zeroed_bytes(cells * few[0].nbytes).reshape(cells, *few.shape[1:])
    for start in range(0, cells, len(few)):
        memory[start : start + len(few)] = few[: cells - start]
    return external(memory.ctypes.data, memory, type_id, (n, 1, cells), role="cache")


class Layer:
    """The ops of one layer with caches of its own."""

    def __init__(self, cells: int, tokens: int, type_id: int, top_k: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        g = Graph(core)
        keys, rows = cache(cells, INDEX_SIZE, F16, seed), cache(cells, LATENT, type_id, seed + 1)
        keys.dynamic_dim = rows.dynamic_dim = 2
        offset = registry.by_id(type_id).row_nbytes(LATENT - VALUES)
        values = Value(rows.buffer, type_id, (VALUES, *rows.shape[1:]), rows.strides, offset, 2)
        mask = (
            value_of(np.zeros((tokens, cells), np.float16), F16),
            value_of(np.tile(np.array([0, cells], np.int32), (tokens, 1)), I32),
        )
        index_q, weights, q = (
            value_of(rng.standard_normal(shape).astype(np.float32), F32)
            for shape in ((tokens, INDEX_HEADS, INDEX_SIZE), (tokens, INDEX_HEADS), (tokens, HEADS, LATENT))
        )
        chosen = g.choose_cells(index_q, weights, keys, mask, top_k)
        results = [chosen]
        for how in (chosen, None):
            results.append(g.attention(q, [rows], values, mask, scale=LATENT**-0.5, flash=True, chosen=how))
        arena = plan_arena(g.nodes, {value.buffer for value in results})
        self.memory = np.zeros(arena.nbytes + 64, np.uint8)
        self.plan = CompiledPlan(core, g.nodes, arena, self.memory.ctypes.data + -self.memory.ctypes.data % 64)
        self.cells = cells

    def seconds(self, op: int) -> float:
        """CPU time of an op: choice, attention to the chosen cells, to all."""
        start = time.thread_time()
        self.plan.run(self.cells, 1, None, op, op + 1)
        return time.thread_time() - start


def main() -> None:
    """A line for every type and number of cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="4096,8192,32768,131072")
    parser.add_argument("--types", default="f16,q8_0")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    print(f"{tier}, {args.tokens} tokens, best {args.top_k} cells, ms")
    print(f"{'type':>8} {'cells':>8} {'choice':>9} {'chosen':>9} {'sum':>9} {'all':>9} {'all/sum':>8}")
    for name in args.types.split(","):
        for cells in map(int, args.cells.split(",")):
            layers = [Layer(cells, args.tokens, registry.by_name(name).id, args.top_k, 10 * i) for i in range(3)]
            best = [np.inf] * 3
            for _ in range(args.repeats):
                for layer in layers:
                    best = [min(seconds, layer.seconds(op)) for op, seconds in enumerate(best)]
            choice, chosen, everything = (1e3 * seconds for seconds in best)
            figures = choice, chosen, choice + chosen, everything
            row = "".join(f" {value:9.2f}" for value in figures)
            print(f"{name:>8} {cells:>8}{row} {everything / (choice + chosen):8.1f}")


if __name__ == "__main__":
    main()
