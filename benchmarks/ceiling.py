"""Prints this machine's ceilings: int8-dot, bf16-dot, tile and fp32-FMA rates and read bandwidth at 1 and N threads.

python -m benchmarks.ceiling [--threads N] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from ikpy._native import core, tier
from ikpy.machine.threads import physical_cores

LABELS = {
    "int8": "GOPS int8 dot",
    "bf16": "GFLOPS bf16 dot",
    "amx_bf16": "GFLOPS bf16 tiles",
    "fp32": "GFLOPS fp32 FMA",
    "read": "GB/s read",
}


class Ceilings:
    """Best rate of each kind over all samples of a run.

    Other load only ever lowers a sample, so samples spread over a run give a yardstick that one descheduled thread
    cannot halve.
    """

    def __init__(self, threads: list[int]) -> None:
        self.best: dict[int, dict[str, float]] = {n: dict.fromkeys(LABELS, 0.0) for n in sorted(set(threads))}
        self.samples: dict[int, dict[str, list[float]]] = {n: {kind: [] for kind in LABELS} for n in self.best}

    def sample(self, kinds: tuple[str, ...] = tuple(LABELS)) -> None:
        """Measures the kinds once more at every thread count."""
        for n, best in self.best.items():
            for kind in kinds:
                rate = core.ceiling(kind, n)
                self.samples[n][kind].append(rate)
                best[kind] = max(best[kind], rate)

    def add(self, samples: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Takes the samples of an earlier run, by threads and kind, as its pieces are measured by them."""
        for n, best in self.best.items():
            for kind, rates in samples.get(str(n), {}).items():
                self.samples[n][kind] = [*rates, *self.samples[n][kind]]
                best[kind] = max(best[kind], *rates)


def measure(n_threads: int, repeats: int = 3) -> dict[str, float]:
    """Best of several measurements, so that other load on the machine does not lower the yardstick."""
    ceilings = Ceilings([n_threads])
    for _ in range(repeats):
        ceilings.sample()
    return ceilings.best[n_threads]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    results = {n: measure(n) for n in sorted({1, a.threads})}
    if a.json:
        print(json.dumps({"tier": tier, "ceilings": results}))
        return
    for n, values in results.items():
        shown = ", ".join(f"{values[key]:.0f} {label}" for key, label in LABELS.items() if values[key])
        print(f"{tier}, {n} thread{'s' if n > 1 else ''}: {shown}")


if __name__ == "__main__":
    main()
