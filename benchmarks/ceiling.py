"""Prints this machine's ceilings: int8-dot, bf16-dot, fp32-FMA rates and read bandwidth at 1 and N threads.

python -m benchmarks.ceiling [--threads N] [--json]
"""

from __future__ import annotations

import argparse
import json

from ikpy._native import core, tier
from ikpy.threads import physical_cores

LABELS = {"int8": "GOPS int8 dot", "bf16": "GFLOPS bf16 dot", "fp32": "GFLOPS fp32 FMA", "read": "GB/s read"}


def measure(n_threads: int, repeats: int = 3) -> dict[str, float]:
    """Best of several measurements, so that other load on the machine does not lower the yardstick."""
    return {kind: max(core.ceiling(kind, n_threads) for _ in range(repeats)) for kind in LABELS}


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
        shown = ", ".join(f"{values[key]:.0f} {label}" for key, label in LABELS.items())
        print(f"{tier}, {n} thread{'s' if n > 1 else ''}: {shown}")


if __name__ == "__main__":
    main()
