"""Tests and measurements on a GPU, in sections, within a given time.

    python -m benchmarks.gpu real|bench [MODEL ...] [--results FOLDER] [--budget SECONDS] [--sections A,B] [--list]

real: is everything right? bench: how fast is it? MODEL: a GGUF file, or the name of a shape (benchmarks/shapes.py) that
is written with random weights. Output is shown and kept as it comes, in FOLDER: log.txt, results.json and results.md,
failures by kernel first. A section that the time does not allow is left for a next command; FOLDER may have the results
of earlier ones, which are not repeated unless --sections names them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import MODES, Choice
from benchmarks.gpu.session import run_sections

MODELS = ("llama-1b", "llama-8b", "deepseek-lite", "qwen3-30b-a3b")


def main() -> int:
    """Parse, run, and tell what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--results", type=Path, default=Path("gpu-results"), help="folder (default: gpu-results)")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for everything (default: 3600)")
    parser.add_argument("--since", type=float, help="when the time began, in seconds since 1970 (default: now)")
    parser.add_argument("--sections", default="", help="names of sections, separated by commas (default: all)")
    parser.add_argument("--models-folder", type=Path, default=Path(tempfile.gettempdir()) / "ikpy-gpu-models")
    parser.add_argument("--list", action="store_true", help="print sections and commands, run nothing")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for an emulated device (IKPY_CUDA_EMULATE=1)")
    arguments = parser.parse_args()
    results = Results.open(arguments.results)
    arguments.models_folder.mkdir(parents=True, exist_ok=True)
    models = arguments.models or (["narrow"] if arguments.small else MODELS)
    sections = MODES[arguments.mode](Choice(results, models, arguments.models_folder, arguments.small))
    wanted = [name for name in arguments.sections.split(",") if name]
    unknown = set(wanted) - {section.name for section in sections}
    if unknown:
        known = ", ".join(section.name for section in sections)
        parser.error(f"--sections {', '.join(sorted(unknown))}: there are {known}")
    chosen = [section for section in sections if section.name in wanted or not wanted]
    if arguments.list:
        for section in chosen:
            print(f"{section.name}, about {section.seconds} s")
            print(*("  " + " ".join(step.command) for step in section.steps), sep="\n")
        return 0
    # As Ctrl-C: what is under way is ended with this process.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    spent = time.time() - arguments.since if arguments.since else 0.0
    return run_sections(chosen, results, arguments.budget - spent, again=bool(wanted))


if __name__ == "__main__":
    raise SystemExit(main())
