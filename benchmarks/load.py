"""Prints how long opening a model takes and what it adds to resident memory.

python -m benchmarks.load model.gguf
"""

from __future__ import annotations

import sys
import time

import psutil

from ikpy import Context, ContextParams, Model


def main() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    started = time.perf_counter()
    model = Model.load(sys.argv[1])
    loaded = time.perf_counter()
    Context(model, ContextParams(n_ctx=4096))
    ready = time.perf_counter()
    grown = process.memory_info().rss - before
    print(
        f"{model.size_bytes / 1e9:.2f} GB: load {loaded - started:.2f} s, context {ready - loaded:.2f} s, "
        f"resident memory +{grown >> 20} MiB"
    )


if __name__ == "__main__":
    main()
