"""Options of the benchmarks of single steps."""

from __future__ import annotations

import argparse


def step_options(description: str, counted: str) -> argparse.Namespace:
    """Models, how many of what is counted ("tokens", "slots") a step has, steps and threads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", nargs="+", default=[])
    parser.add_argument(f"--{counted}", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()
