"""What a step of the server's engine costs outside the kernels, without HTTP, in microseconds.

python -m benchmarks.engine_step [--model model.gguf ...] [--slots 1 8] [--steps 60]

Every slot writes one answer; a step makes the batch, evaluates it, draws a token per slot and hands out its text. The
figures are medians over the steps less the time of threads and kernels, greedy and with the default samplers. Without
--model: the bundled model, whose weights stay in the caches, and the shape of Llama-3.2-1B with 4 layers, whose weights
and 128,256 logits push the interpreter out of them.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

import ikpy
from benchmarks.step_options import step_options
from benchmarks.synthetic import write_model
from ikpy.cli.parser import parse
from ikpy.cli.server import make_server
from ikpy.cli.session import load
from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.graph.plan import CompiledPlan
from ikpy.server.log import ServerLog
from ikpy.server.params import GenerationParams
from ikpy.server.scheduler import Engine
from ikpy.server.tasks import CompletionTask, Event

N_CTX = 512
N_PROMPT = 20
N_WARM = 8
CHOICES = {"greedy": SamplingParams(temperature=0), "default samplers": SamplingParams(seed=3)}


def engine(path: str, n_slots: int, threads: int) -> Engine:
    """An engine whose thread does not run."""
    sizes = ["-c", str(N_CTX * n_slots), "-np", str(n_slots), "-t", str(threads)]
    session = load(parse(["-m", path, "--log-disable", "--no-mmap", *sizes], "server"))
    return make_server(session, ServerLog()).engine


def fill(engine: Engine, sampling: SamplingParams, n_tokens: int) -> list[Event]:
    """Gives every slot an answer of so many tokens to write; the list that gets the events."""
    events: list[Event] = []
    n_vocab = engine.context.model.hparams.n_vocab
    params = GenerationParams(sampling, limit=n_tokens, stream=True)
    for i in range(len(engine.slots)):
        sampler = Sampler(sampling, n_vocab, n_ctx=N_CTX)
        engine.submit(CompletionTask([5 + i] * N_PROMPT, events.append, i, request=i, params=params, sampler=sampler))
    return events


def overheads(engine: Engine, sampling: SamplingParams, steps: int) -> list[float]:
    """Microseconds of every step outside threads and kernels."""
    n, found = len(engine.slots), []
    events = fill(engine, sampling, N_WARM + steps + N_WARM)
    for _ in range(N_WARM):
        engine._work()
    plan = engine.context._plans.get(n, n).plan
    assert isinstance(plan, CompiledPlan)
    for _ in range(steps):
        began = time.perf_counter()
        engine._work()
        engine._wake_readers()
        found.append(1e6 * (time.perf_counter() - began - plan.seconds))
    if len(events) < n * steps:
        raise SystemExit("an answer has ended before its time: use another --model")
    while any(slot.task for slot in engine.slots):
        engine._work()
    return found


def main() -> None:
    args = step_options("microseconds per step of the server's engine outside the kernels", "slots")
    with tempfile.TemporaryDirectory() as folder:
        paths = args.model
        if not paths:
            paths = [str(ikpy.default_model_path()), f"{folder}/llama-1b-4-layers.gguf"]
            write_model("llama-1b", "q4_K", paths[1], layers=4)
        print(f"| model | slots | {' | '.join(CHOICES)} |")
        print(f"| --- | ---:{' | ---:' * len(CHOICES)} |")
        for path in paths:
            for n_slots in args.slots:
                used = engine(path, n_slots, args.threads)
                medians = [np.median(overheads(used, sampling, args.steps)) for sampling in CHOICES.values()]
                print(f"| {Path(path).stem} | {n_slots} | {' | '.join(f'{us:.0f}' for us in medians)} |", flush=True)


if __name__ == "__main__":
    main()
