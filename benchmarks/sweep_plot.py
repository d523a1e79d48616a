"""Curves of speed over the length of the context, from what `ikpy sweep-bench` or `llama-sweep-bench` printed.

    python -m benchmarks.sweep_plot a.txt b.txt [--folder DIR]

Files hold tables, whole logs, JSON lines or CSV; each is a curve with the file's name. Writes
performance_comparison_pp.png and performance_comparison_tg.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HEADINGS = {"N_KV": "n_kv", "S_PP t/s": "speed_pp", "S_TG t/s": "speed_tg"}
TITLES = {"pp": "prompt processing", "tg": "generation"}


@dataclass
class Curve:
    """Speeds in tokens per second over the number of cached tokens."""

    n_kv: list[int] = field(default_factory=list)
    speed_pp: list[float] = field(default_factory=list)
    speed_tg: list[float] = field(default_factory=list)

    def add(self, row: Mapping[str, str | float]) -> None:
        """Appends a row with these fields. KeyError, TypeError or ValueError if it is none."""
        n_kv, speed_pp, speed_tg = int(row["n_kv"]), float(row["speed_pp"]), float(row["speed_tg"])
        self.n_kv.append(n_kv)
        self.speed_pp.append(speed_pp)
        self.speed_tg.append(speed_tg)


def read_curve(lines: Iterable[str]) -> Curve:
    """The rows among these lines, whatever else they hold. ValueError if there are none."""
    curve = Curve()
    names: list[str] = []
    for line in lines:
        text = line.strip()
        if text.startswith("|"):
            cells = [cell.strip() for cell in text.strip("|").split("|")]
            if HEADINGS.keys() <= set(cells):
                names = [HEADINGS.get(cell, cell) for cell in cells]
                continue
        elif "n_kv" in (cells := next(csv.reader([text]), [])):
            names = cells
            continue
        try:
            curve.add(json.loads(text) if text.startswith("{") else dict(zip(names, cells, strict=True)))
        except (KeyError, TypeError, ValueError):
            continue  # another line of a log
    if not curve.n_kv:
        raise ValueError("no rows of sweep-bench")
    return curve


def plot(curves: Mapping[str, Curve], folder: Path) -> list[Path]:
    """Writes a PNG of prompt speeds and one of generation speeds; their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for test, title in TITLES.items():
        figure, axis = pyplot.subplots(figsize=(10, 6), constrained_layout=True)
        for name, curve in curves.items():
            axis.plot(curve.n_kv, getattr(curve, f"speed_{test}"), marker=".", label=name)
        axis.set(title=title, xlabel="cached tokens", ylabel="tokens/s", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
        paths.append(folder / f"performance_comparison_{test}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what sweep-bench printed")
    parser.add_argument("--folder", type=Path, default=Path(), help="where the pictures go (default: here)")
    a = parser.parse_args()
    curves: dict[str, Curve] = {}
    for path in a.files:
        try:
            curves[str(path) if path.stem in curves else path.stem] = read_curve(
                path.read_text(errors="replace").splitlines()
            )
        except (OSError, ValueError) as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            return 1
    try:
        print(*plot(curves, a.folder), sep="\n")
    except ImportError:
        print('error: matplotlib is not installed (pip install -e ".[bench]")', file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
