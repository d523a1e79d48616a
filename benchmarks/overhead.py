"""What a token costs outside the kernels, in microseconds.

python -m benchmarks.overhead [--model model.gguf ...] [--tokens 1 8] [--steps 60]

Between two tokens of a real model the weights stream through the caches, so that the code and data of the interpreter
come from memory; the figures are medians over steps of generation and contain that. Without --model: models of the
Llama-3.2-1B and (with windows of 512 tokens and a small vocabulary) Gemma 2 2B shapes with 4 layers, and two of 28
layers and little width whose weights stay in the caches, one of them with windows. The cells of windows are full: every
token needs the place of another. "batch and decode" is the overhead of making the batch and evaluating it, all but the
time of threads and kernels ("native run"); sampling is that of the most likely token. With 8 tokens, each belongs to a
sequence of its own. Lines below the table: milliseconds that the first batch of a new size takes longer, since its plan
is built.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.step_options import step_options
from benchmarks.synthetic import write_model
from ikpy import Batch, Context, ContextParams, Model, ModelParams
from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.graph.plan import CompiledPlan

N_PROMPT = 4
MODELS = ("llama-1b-4-layers", "narrow-28-layers", "gemma2-2b-4-layers", "narrow-window-28-layers")
PARTS = ("batch", "decode", "greedy sampling", "native run")


def batch_of(n: int, position: int) -> Batch:
    """A token of each of n sequences."""
    if n == 1:
        return Batch.one(7, position)
    return Batch([7] * n, [position] * n, range(n), [True] * n)


def prompted(context: Context, n: int) -> int:
    """Puts texts into the empty cache, as long as they fill the cells of windows; returns their length."""
    context.kv.clear()
    length = max([N_PROMPT, *(-(-cells.n_cells // n) for cells in context.kv.windows.values())])
    for seq_id in range(n):
        context.decode(Batch.single([i % 100 for i in range(length)], 0, seq_id, "none"))
    return length


def parts(context: Context, n: int, steps: int) -> list[list[float]]:
    """Time of every part of every step."""
    start = prompted(context, n)
    sampler = Sampler(SamplingParams(temperature=0), context.model.hparams.n_vocab)
    plan, found = context._plans.get(n, n).plan, []
    assert isinstance(plan, CompiledPlan)
    for step in range(steps):
        began = time.perf_counter()
        batch = batch_of(n, start + step)
        made = time.perf_counter()
        rows = context.decode(batch, copy=False)
        decoded = time.perf_counter()
        for row in rows:
            sampler.accept(sampler.sample(row, context.known_maxima))
        ended = time.perf_counter()
        times = made - began, decoded - made - plan.seconds, ended - decoded, plan.seconds
        found.append([1e6 * seconds for seconds in times])
    return found


def report(name: str, context: Context, n: int, steps: int) -> str:
    """One row of the table."""
    medians = np.median(parts(context, n, steps), axis=0)
    values = [medians[0] + medians[1], *medians]
    return f"| {name} | {n} | " + " | ".join(f"{value:.0f}" for value in values) + " |"


def plan_milliseconds(context: Context) -> float:
    """Median time to build the plan of a batch size that was not met before."""
    found = []
    for n_tokens in range(40, 60):
        began = time.perf_counter()
        context._plans.get(n_tokens, 1)
        found.append(1e3 * (time.perf_counter() - began))
    return float(np.median(found))


def main() -> None:
    args = step_options("microseconds per token outside the kernels", "tokens")
    with tempfile.TemporaryDirectory() as folder:
        paths = args.model
        if not paths:
            paths = list(map(f"{folder}/{{}}.gguf".format, MODELS))
            write_model("llama-1b", "q4_K", paths[0], layers=4)
            write_model("narrow", "q8_0", paths[1])
            write_model("gemma2-2b", "q4_K", paths[2], layers=4, vocab=32768, window=512)
            write_model("narrow-window", "q8_0", paths[3])
        print(f"| model | tokens | batch and decode | {' | '.join(PARTS)} |")
        print(f"| --- | ---: | ---:{' | ---:' * len(PARTS)} |")
        plans = []
        for path in paths:
            model = Model.load(path, ModelParams(use_mmap=False))
            settings = ContextParams(n_ctx=8192, n_seq_max=max(args.tokens), n_threads=args.threads)
            context = Context(model, settings)
            for n in args.tokens:
                print(report(Path(path).stem, context, n, args.steps), flush=True)
            plans.append(f"{Path(path).stem}: {plan_milliseconds(context):.1f} ms for the plan of a new batch size")
        print("", *plans, sep="\n")


if __name__ == "__main__":
    main()
