"""Speed of a mixture of experts that is larger than memory, with experts read ahead and without, in turns.

    systemd-run --scope -p MemoryMax=4500M -p MemorySwapMax=0 \\
        python -m benchmarks.expert_reads model.gguf [--threads N] [--readers 0,4] [--prompt N] [--tokens N]
            [--rounds N]

The scope leaves less memory than the model takes. Every round processes a prompt of random tokens and generates some
with each number of readers (0: pages are read where they are missed). A first round, which is not shown, fills memory.
Read: bytes that came from the drive per generated token, and their rate; above the table, what the drive gives when
eight threads read pieces of 1 MiB of the file from everywhere.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model, open_model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.gguf.reader import GGUFFile

PIECE = 1 << 20
PIECES = 1024
DRIVE_THREADS = 8


def read_bytes() -> int:
    """Bytes that this process had read from drives."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def drive_rate(path: str) -> float:
    """GB/s of reading from everywhere in the file, past what memory holds of it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        n_pieces = os.fstat(descriptor).st_size // PIECE
        chosen = np.random.default_rng(1).permutation(n_pieces)[:PIECES]
        before, start = read_bytes(), time.perf_counter()
        with ThreadPoolExecutor(DRIVE_THREADS) as pool:
            list(pool.map(lambda i: len(os.pread(descriptor, PIECE, int(i) * PIECE)), chosen))
        return (read_bytes() - before) / (time.perf_counter() - start) / 1e9
    finally:
        os.close(descriptor)


class Run:
    """A context over the file with a number of readers."""

    def __init__(self, file: GGUFFile, n_readers: int, args: argparse.Namespace) -> None:
        self.n_readers, self.prompt, self.n_tokens = n_readers, args.prompt, args.tokens
        model = Model.load(file, ModelParams(prefetch_experts=n_readers > 0, prefetch_threads=n_readers))
        params = ContextParams(
            n_ctx=args.prompt + args.tokens, n_ubatch=args.prompt, n_batch=args.prompt, n_threads=args.threads
        )
        self.context = Context(model, params)
        self.n_vocab = model.hparams.n_vocab
        self.prompts: list[float] = []
        self.generation: list[float] = []
        self.from_drive: list[float] = []

    def measure(self, random: np.random.Generator) -> None:
        """A prompt and some tokens, all of them random."""
        tokens = random.integers(0, self.n_vocab, self.prompt + self.n_tokens)
        self.context.kv.clear()
        start = time.perf_counter()
        self.context.decode(Batch.single(tokens[: self.prompt]))
        middle, before = time.perf_counter(), read_bytes()
        for i in range(self.prompt, len(tokens)):
            self.context.decode(Batch.single(tokens[i : i + 1], i))
        self.prompts.append(middle - start)
        self.generation.append(time.perf_counter() - middle)
        self.from_drive.append(read_bytes() - before)

    def row(self) -> str:
        """Of the table."""
        seconds, nbytes = statistics.median(self.generation), statistics.median(self.from_drive)
        prompt = self.prompt / statistics.median(self.prompts)
        return (
            f"| {self.n_readers} | {prompt:.2f} | {self.n_tokens / seconds:.2f} | {nbytes / self.n_tokens / 1e6:.0f} "
            f"| {nbytes / seconds / 1e9:.2f} |"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--readers", default="0,4")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    random = np.random.default_rng(2)
    file = open_model(args.model, ModelParams())  # one mapping: pages of several are slow to give up
    runs = [Run(file, int(n), args) for n in args.readers.split(",")]
    rate = drive_rate(args.model)
    for round_number in range(args.rounds + 1):
        for run in runs:
            run.measure(random)
            if round_number == 0:
                run.prompts, run.generation, run.from_drive = [], [], []
    print(f"{rate:.2f} GB/s of the drive")
    print("| readers | prompt, tokens/s | generation, tokens/s | MB read per token | GB/s |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for run in runs:
        print(run.row())


if __name__ == "__main__":
    main()
