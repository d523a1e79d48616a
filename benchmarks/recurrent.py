"""The ops of recurrent layers against what the machine does: delta rule or selective scan, and the convolution, alone.

    python -m benchmarks.recurrent [--op delta|scan] [--heads 32,48] [--tokens 1,8,512] [--threads 1] [--copies]

Layers of the size of Qwen3-Next (32 heads of v) and of its successors (48): 16 heads of q and k, 128 elements in a
head, 4 taps. The scan has heads of 64 elements, states of 128 rows and one group, as Granite 4.0 H Tiny (48) and Small
(128). Every layer has a state of its own, `--mib` in all, so that a token finds it in memory, as in a model.
Columns: tokens/s of one layer; GB/s of the state, read and written once per run, and their share of the read
bandwidth; GFLOPS at three multiply-adds per element of the state and token (the scan: two), and their share of fp32
FMA; the
convolution's share of the time of both. The ceilings are measured at the start; the best of `--repeats` runs counts,
that of one thread in CPU time, so that other load hardly matters. --copies: of the states behind all tokens but the
last, as for drafts; they come on top of the bytes that are counted.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.attention import seconds
from ikpy._native import core, tier
from ikpy.gguf.huge_pages import zeroed_bytes
from ikpy.graph.builder import Graph, KeptStates
from ikpy.graph.ir import F32, I32, Value, external
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import plan_arena

KEY_HEADS, SIZE, TAPS = 16, 128, 4
SCAN_SIZE = 64


def value_of(array: np.ndarray) -> Value:
    """A contiguous value over the array."""
    return external(array.ctypes.data, array, I32 if array.dtype == np.int32 else F32, array.shape[::-1])


class Case:
    """Both ops of as many layers as fill `nbytes` with their states and copies, for batches of one sequence."""

    def __init__(self, heads: int, tokens: int, nbytes: int, *, copies: bool) -> None:
        rng = np.random.default_rng(1)
        channels = (2 * KEY_HEADS + heads) * SIZE
        state_nbytes = 4 * heads * SIZE * SIZE
        n_copies = tokens - 1 if copies else 0
        n_layers = max(1, nbytes // (state_nbytes * (1 + n_copies)))
        normal = [rng.standard_normal(shape, np.float32) for shape in ((tokens, channels), (channels, TAPS))]
        x, weight = map(value_of, normal)
        decay = value_of(-rng.exponential(0.3, (tokens, heads)).astype(np.float32))
        beta = value_of(rng.random((tokens, heads), np.float32))
        slots = value_of(np.zeros(tokens, np.int32))
        self.rule, self.convolution, self.plans = Graph(core), Graph(core), []
        memory = zeroed_bytes(n_layers * (1 + n_copies) * state_nbytes).view(np.float32)
        states = memory.reshape(n_layers, 1 + n_copies, heads, SIZE, SIZE)
        past = np.zeros((n_layers, 1 + n_copies, channels, TAPS - 1), np.float32)
        to = value_of(np.array([*range(n_copies), *[-1] * (tokens - n_copies)], np.int32))
        q, k, v = (
            x.view((SIZE, n, tokens), (4 * SIZE, x.strides[1]), 4 * SIZE * first)
            for first, n in ((0, KEY_HEADS), (KEY_HEADS, KEY_HEADS), (2 * KEY_HEADS, heads))
        )
        for layer in range(n_layers):
            kept, kept_past = (
                KeptStates(value_of(slots_of[layer, 1:]), to) if n_copies else None for slots_of in (states, past)
            )
            state = value_of(states[layer, :1])
            self.rule.gated_delta_rule(
                q, k, v, decay, beta, state, slots, l2_eps=1e-6, scale=SIZE**-0.5, interleaved=True, kept=kept
            )
            self.convolution.causal_conv(x, weight, value_of(past[layer, :1]), slots, silu=True, kept=kept_past)
        self.n_layers, self.bytes = n_layers, 2.0 * n_layers * state_nbytes
        self.operations = 6.0 * n_layers * tokens * heads * SIZE * SIZE

    def best(self, graph: Graph, threads: int, repeats: int) -> float:
        """Seconds of the op in all layers."""
        arena = plan_arena(graph.nodes, set())
        memory = zeroed_bytes(arena.nbytes + 64)
        plan = CompiledPlan(core, graph.nodes, arena, memory.ctypes.data + -memory.ctypes.data % 64)
        return min(seconds(lambda n: plan.run(0, n), threads) for _ in range(repeats))


class ScanCase(Case):
    """The selective scan of Mamba-2 and the convolution before it."""

    def __init__(self, heads: int, tokens: int, nbytes: int, *, copies: bool) -> None:
        rng = np.random.default_rng(1)
        channels = heads * SCAN_SIZE + 2 * SIZE
        state_nbytes = 4 * heads * SCAN_SIZE * SIZE
        n_copies = tokens - 1 if copies else 0
        n_layers = max(1, nbytes // (state_nbytes * (1 + n_copies)))
        normal = [rng.standard_normal(shape, np.float32) for shape in ((tokens, channels), (channels, TAPS))]
        mixed, weight = map(value_of, normal)
        dt, skips = (value_of(rng.random(shape, np.float32)) for shape in ((tokens, heads), (heads, 1)))
        rates = value_of(-rng.random((heads, 1), np.float32))
        slots = value_of(np.zeros(tokens, np.int32))
        self.rule, self.convolution = Graph(core), Graph(core)
        memory = zeroed_bytes(n_layers * (1 + n_copies) * state_nbytes).view(np.float32)
        states = memory.reshape(n_layers, 1 + n_copies, heads, SIZE, SCAN_SIZE)
        past = np.zeros((n_layers, 1 + n_copies, channels, TAPS - 1), np.float32)
        to = value_of(np.array([*range(n_copies), *[-1] * (tokens - n_copies)], np.int32))
        x, b, c = (
            mixed.view((size, n, tokens), (4 * size, mixed.strides[1]), 4 * first)
            for first, size, n in (
                (0, SCAN_SIZE, heads),
                (heads * SCAN_SIZE, SIZE, 1),
                (heads * SCAN_SIZE + SIZE, SIZE, 1),
            )
        )
        for layer in range(n_layers):
            kept, kept_past = (
                KeptStates(value_of(slots_of[layer, 1:]), to) if n_copies else None for slots_of in (states, past)
            )
            self.rule.ssm_scan(x, dt, rates, b, c, skips, value_of(states[layer, :1]), slots, kept=kept)
            self.convolution.causal_conv(mixed, weight, value_of(past[layer, :1]), slots, silu=True, kept=kept_past)
        self.n_layers, self.bytes = n_layers, 2.0 * n_layers * state_nbytes
        self.operations = 4.0 * n_layers * tokens * heads * SCAN_SIZE * SIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=("delta", "scan"), default="delta")
    parser.add_argument("--heads", default="32,48")
    parser.add_argument("--tokens", default="1,8,512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--copies", action="store_true", help="of the states behind all tokens but the last")
    parser.add_argument(
        "--mib", type=int, default=256, help="bytes of all states of a case; 512 tokens take a sixteenth"
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    read, fma = (max(core.ceiling(what, args.threads) for _ in range(3)) for what in ("read", "fp32"))
    print(f"tier {tier}, {args.threads} threads, ceilings {read:.1f} GB/s, {fma:.0f} GFLOPS")
    print(f"{'heads':>5} {'tokens':>6} {'tokens/s':>9} {'GB/s':>6} {'share':>6} {'GFLOPS':>7} {'share':>6} {'conv':>5}")
    for heads in map(int, args.heads.split(",")):
        for tokens in map(int, args.tokens.split(",")):
            case = (ScanCase if args.op == "scan" else Case)(
                heads, tokens, (args.mib << 20) // (16 if tokens >= 512 else 1), copies=args.copies
            )
            rule, conv = (case.best(graph, args.threads, args.repeats) for graph in (case.rule, case.convolution))
            bandwidth, rate = 1e-9 * case.bytes / rule, 1e-9 * case.operations / rule
            print(
                f"{heads:5} {tokens:6} {tokens * case.n_layers / rule:9.0f} {bandwidth:6.1f} {bandwidth / read:6.0%}"
                f" {rate:7.1f} {rate / fma:6.0%} {conv / (rule + conv):5.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
