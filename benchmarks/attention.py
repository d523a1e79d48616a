"""Attention of one token against what the machine reads: the op alone, per cache type and shape.

    python -m benchmarks.attention [--shapes gqa64,gqa128,mla] [--types f16,q8_0] [--cells 8192] [--threads 1]
    python -m benchmarks.attention --tokens 128 --shapes gqa128,mla192 --cells 32768        (a prompt at depth)

For every shape and type: GB/s of cache bytes with the caches of many layers in turn (`--mib` in all); GB/s with one
small cache that stays in the second-level cache, the rate of the arithmetic; the share of the read bandwidth, which is
measured at the start; and the error of the output against float64, relative to the largest element. Runs of the two
alternate, and the best of each counts. One thread is measured in CPU time, so that other load hardly matters.

With more tokens, all of which see all cells: GFLOPS of both products in place of GB/s, and their share of the vectors'
ceiling, the faster of bf16 dot products and fp32 multiply-adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from benchmarks import reference_attention as ref
from ikpy._native import core, tier
from ikpy.gguf.huge_pages import zeroed_bytes
from ikpy.graph.plan import TENSOR_DTYPE

TYPES = {name: type_id for type_id, name in ref.TYPE_NAMES.items() if name != "f32"}
# Query heads, K heads, elements of a K row and of a V row; V is inside K where there is one K head.
SHAPES = {
    "mha64": (16, 16, 64, 64),
    "gqa64": (32, 8, 64, 64),
    "gqa128": (32, 8, 128, 128),
    "gqa8x128": (32, 4, 128, 128),
    "mla192": (16, 16, 192, 128),
    "mla": (16, 1, 576, 512),
    "mla128": (128, 1, 576, 512),
}
CACHED_BYTES = 1_200_000


class Layer:
    """One attention op over a cache of its own."""

    def __init__(
        self, shape: tuple[int, int, int, int], tokens: int, type_id: int, k: np.ndarray, v: np.ndarray | None
    ) -> None:
        heads, kv_heads, dk, dv = shape
        op = ref.NativeOp("attention")
        self.q = np.random.default_rng(2).standard_normal((tokens, heads, dk)).astype(np.float32)
        self.out = np.zeros((tokens, heads, dv), np.float32)
        op.op["dst"] = op.dense(self.out, ref.F32)
        src = op.op["src"][0]
        src[0] = op.dense(self.q, ref.F32)
        src[1] = op.tensor(k, type_id, [dk, kv_heads, len(k)], [0, *k.strides[1::-1]])
        if v is None:
            src[2] = op.tensor(k, type_id, [dv, kv_heads, len(k)], [0, *k.strides[1::-1]])
        else:
            src[2] = op.tensor(v, type_id, [dv, kv_heads, len(v)], [0, *v.strides[1::-1]])
        op.op["fp"][0, 0] = 1 / np.sqrt(dk)
        op.op["ip"][0, :2] = 1, heads
        self.record, self.cells = op, len(k)
        self.plan = core.Plan(np.array(op.tensors, TENSOR_DTYPE), op.op, ())
        self.nbytes = k.nbytes + (0 if v is None else v.nbytes)
        self.operations = 2 * tokens * heads * (dk + dv) * len(k)

    def run(self, threads: int) -> None:
        self.plan.run(self.cells, threads)


def large(rows: np.ndarray, n: int) -> np.ndarray:
    """The rows repeated to n, in memory of their own in huge pages, as caches of contexts are."""
    memory = zeroed_bytes(n * rows[0].nbytes).view(rows.dtype).reshape(n, *rows.shape[1:])
    memory[:] = np.concatenate([rows] * -(-n // len(rows)))[:n]
    return memory


class Case:
    """A shape and type with the caches of as many layers as fill `nbytes`, and one small cache."""

    def __init__(self, shape: tuple[int, int, int, int], tokens: int, type_id: int, cells: int, nbytes: int) -> None:
        rng = np.random.default_rng(1)
        _, kv_heads, dk, dv = shape
        caches = [
            ref.make_cache(rng.standard_normal((256, kv_heads, d)).astype(np.float32), type_id)[0] for d in (dk, dv)
        ]
        inside = kv_heads == 1
        per_cell = sum(cache[0].nbytes for cache in (caches[:1] if inside else caches))
        small = max(64, CACHED_BYTES // per_cell // 64 * 64)

        def layer(n: int) -> Layer:
            return Layer(shape, tokens, type_id, large(caches[0], n), None if inside else large(caches[1], n))

        self.small = layer(small)
        self.layers = [layer(cells) for _ in range(max(1, nbytes // (per_cell * cells)))]
        self.cached_runs = 50 if tokens == 1 else 1

    def work(self, layers: list[Layer]) -> float:
        """What a rate counts: bytes of the caches, operations if there are several tokens."""
        return float(sum(each.nbytes if len(each.q) == 1 else each.operations for each in layers))

    def run_memory(self, threads: int) -> None:
        for each in self.layers:
            each.run(threads)

    def run_cached(self, threads: int) -> None:
        for _ in range(self.cached_runs):
            self.small.run(threads)

    def rates(self, threads: int) -> tuple[float, float]:
        """Bytes or operations per second with the layers in turn and with the small cache."""
        return (
            self.work(self.layers) / seconds(self.run_memory, threads),
            self.cached_runs * self.work([self.small]) / seconds(self.run_cached, threads),
        )

    def error(self, shape: tuple[int, int, int, int], type_id: int) -> float:
        """Largest difference from float64 over the largest element, of the first token."""
        _, kv_heads, dk, dv = shape
        layer = self.small
        layer.run(1)
        group = shape[0] // kv_heads
        k, *rest = (array for array in layer.record.keep[2:])
        keys = ref.decode_rows(k, type_id, dk)
        values = ref.decode_rows(rest[0], type_id, dv) if kv_heads > 1 else keys[:, :, :dv]
        visible = np.ones((1, layer.cells), bool)
        want = ref.attend(layer.q[:1], np.repeat(keys, group, 1), np.repeat(values, group, 1), visible, 1 / np.sqrt(dk))
        return float(np.abs(layer.out[:1] - want).max() / np.abs(want).max())


def seconds(work: Callable[[int], None], threads: int) -> float:
    clock = time.thread_time if threads == 1 else time.perf_counter
    start = clock()
    work(threads)
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--tokens", type=int, default=1, help="query tokens of a batch")
    parser.add_argument("--cells", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mib", type=int, default=400, help="bytes of all caches of a case")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    limit, unit = core.ceiling("read", args.threads), "GB/s"
    if args.tokens > 1:
        limit, unit = max(core.ceiling(what, args.threads) for what in ("bf16", "fp32")), "GFLOPS"
    print(f"tier {tier}, {args.threads} threads, {args.tokens} tokens, {args.cells} cells of {args.mib} MiB, {unit}")
    print(f"{'shape':9} {'type':7} {'memory':>7} {'cached':>7} {'limit':>6} {'share':>6} {'error':>9}")
    for shape_name in args.shapes.split(","):
        shape = SHAPES[shape_name]
        for name in args.types.split(","):
            case = Case(shape, args.tokens, TYPES[name], args.cells, args.mib << 20)
            runs = [case.rates(args.threads) for _ in range(args.repeats)]
            memory, cached = (1e-9 * max(rates) for rates in zip(*runs, strict=True))
            print(
                f"{shape_name:9} {name:7} {memory:7.1f} {cached:7.1f} {limit:6.1f} {100 * memory / limit:5.0f}%"
                f" {case.error(shape, TYPES[name]):9.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
