"""What a token costs outside the kernels: everything in Python around the one native call, in microseconds.

python -m benchmarks.overhead [--model model.gguf ...] [--tokens 1 8] [--steps 60]

Between two tokens of a real model the weights stream through the caches, so that the code and data of the interpreter
come from memory; the figures are medians over steps of generation and contain that. Without --model: a model of the
Llama-3.2-1B shape with 4 layers, and one of 28 layers and little width whose weights stay in the caches. Parts are
those of Context.decode, run by hand in its order; "whole" is the real thing: making the batch and decoding it, less
the native run. With 8 tokens, each belongs to a sequence of its own. Lines below the table: milliseconds that the first
batch of a new size takes longer, since its plan is built.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.synthetic import write_model
from ikpy import Batch, Context, ContextParams, Model, ModelParams
from ikpy.graph.plan import CompiledPlan

N_PROMPT = 4
PARTS = ("batch", "checks", "cells", "inputs", "plan", "native run")


def microseconds(began: float) -> float:
    """Since a reading of the clock."""
    return 1e6 * (time.perf_counter() - began)


def batch_of(n: int, position: int) -> Batch:
    """A token of each of n sequences."""
    if n == 1:
        return Batch.single([7], position)
    return Batch([7] * n, [position] * n, range(n), [True] * n)


def prompted(context: Context, n: int) -> None:
    """Puts short texts into the empty cache."""
    context.kv.clear()
    for seq_id in range(n):
        context.decode(Batch.single(range(N_PROMPT), 0, seq_id))


def whole(context: Context, n: int, steps: int) -> list[float]:
    """Overhead of every step."""
    prompted(context, n)
    run, native, found = CompiledPlan.run, [0.0], []

    def timed(plan: CompiledPlan, *args: Any) -> None:
        began = time.perf_counter()
        run(plan, *args)
        native[0] = microseconds(began)

    with patch.object(CompiledPlan, "run", timed):
        for step in range(steps):
            began = time.perf_counter()
            context.decode(batch_of(n, N_PROMPT + step), copy=False)
            found.append(microseconds(began) - native[0])
    return found


def parts(context: Context, n: int, steps: int) -> list[list[float]]:
    """Time of every part of every step."""
    prompted(context, n)
    found = []
    for step in range(steps):
        times: list[float] = []

        def timed(function: Callable[..., Any], *args: Any, times: list[float] = times) -> Any:
            began = time.perf_counter()
            result = function(*args)
            times.append(microseconds(began))
            return result

        batch = timed(batch_of, n, N_PROMPT + step)
        timed(context._check, batch)
        cells = timed(context.kv.place, batch.positions, batch.masks)
        timed(context._inputs.write, batch, cells, context.adapter_scales)
        ready = timed(context._plan, n, n)
        timed(ready.plan.run, context.kv.n_kv(context._pad), context.n_threads, context._work)
        found.append(times)
    return found


def report(name: str, context: Context, n: int, steps: int) -> str:
    """One row of the table."""
    medians = np.median(parts(context, n, steps), axis=0)
    values = [np.median(whole(context, n, steps)), *medians]
    return f"| {name} | {n} | " + " | ".join(f"{value:.0f}" for value in values) + " |"


def plan_milliseconds(context: Context) -> float:
    """Median time to build the plan of a batch size that was not met before."""
    found = []
    for n_tokens in range(40, 60):
        began = time.perf_counter()
        context._plan(n_tokens, 1)
        found.append(microseconds(began) / 1e3)
    return float(np.median(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="microseconds per token outside the kernels")
    parser.add_argument("--model", nargs="+", default=[])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = args.model
        if not paths:
            paths = [f"{folder}/llama-1b-4-layers.gguf", f"{folder}/narrow-28-layers.gguf"]
            write_model("llama-1b", "q4_K", paths[0], layers=4)
            write_model("narrow", "q8_0", paths[1])
        print(f"| model | tokens | whole | {' | '.join(PARTS)} |\n| --- | ---: | ---:{' | ---:' * len(PARTS)} |")
        plans = []
        for path in paths:
            model = Model.load(path, ModelParams(use_mmap=False))
            settings = ContextParams(n_ctx=1024, n_seq_max=max(args.tokens), n_threads=args.threads)
            context = Context(model, settings)
            for n in args.tokens:
                print(report(Path(path).stem, context, n, args.steps), flush=True)
            plans.append(f"{Path(path).stem}: {plan_milliseconds(context):.1f} ms for the plan of a new batch size")
        print("", *plans, sep="\n")


if __name__ == "__main__":
    main()
