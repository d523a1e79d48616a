"""Writes the table of all machines beside the peer into README.md and docs/performance.md.

    python -m benchmarks.summary

It is made from the reports that the pages of the machines show (docs/performance-*.json): run it after a new report.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import NamedTuple

from benchmarks.tables import Data, medians, ratio, table

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- benchmarks.summary: begin -->", "<!-- benchmarks.summary: end -->"


class Machine(NamedTuple):
    """A row: what runs there, its page and its reports in docs/ (of types and of model shapes)."""

    name: str
    page: str
    reports: tuple[str, ...]


MACHINES = (
    Machine("Intel Xeon, AVX-512 with AMX tiles", "performance-amx.md", ("performance-amx.json",)),
    Machine("Intel Ice Lake, AVX-512 without tiles", "performance-avx512.md", ("performance-avx512.json",)),
    Machine("AMD Zen 5, AVX-512", "performance-zen5.md", ("performance-zen5.json",)),
    Machine("AMD Zen 4, AVX-512", "performance-zen4.md", ("performance-zen4.json",)),
    Machine("AMD Zen 3, AVX2", "performance-zen3.md", ("performance-zen3.json", "performance-zen3-shapes.json")),
    Machine(
        "Intel Xeon, AVX2 tier",
        "performance-avx2.md",
        ("performance-avx2.json", "performance-avx2-interleaved.json", "performance-avx2-depths.json"),
    ),
)


def ratios(reports: list[Data], section: str, test: str) -> list[float]:
    """Times the best peer of every entry at depth 0 that was measured with one; long prompts count as prompts."""
    found = []
    for data in reports:
        for entries in data.get(section, {}).values():
            for entry in entries if isinstance(entries, list) else [entries]:
                value = ratio(medians(data, entry, test)) if not entry["depth"] else None
                if value is not None and not (test == "tg" and entry.get("prompt")):
                    found.append(value)
    return found


def spread(values: list[float]) -> str:
    """The middle and, in brackets, the smallest and the largest where they differ."""
    if not values:
        return "-"
    low, middle, high = (f"{value:.1f}" for value in (min(values), statistics.median(values), max(values)))
    return f"**{middle}**" if low == high else f"**{middle}** ({low} to {high})"


def rows(folder: str) -> list[list[str]]:
    """A row per machine; links are relative to a page from which docs/ is ``folder``."""
    found = []
    for machine in MACHINES:
        reports = [json.loads((ROOT / "docs" / name).read_text()) for name in machine.reports]
        types = [ratios(reports, "types", test) for test in ("pp", "tg")]
        shapes = [ratios(reports, "shapes", test) for test in ("pp", "tg")]
        name = f"[{machine.name}]({folder}{machine.page})"
        found.append([name, str(len(types[0])), *map(spread, types), *map(spread, shapes)])
    return found


def block(folder: str) -> str:
    headings = ["machine", "types", "prompts", "single tokens", "models: prompts", "models: tokens"]
    return "\n".join([BEGIN, "", *table(headings, rows(folder)), END])


def replaced(text: str, folder: str) -> str:
    """The page with the table between its markers."""
    return text[: text.index(BEGIN)] + block(folder) + text[text.index(END) + len(END) :]


PAGES = {ROOT / "README.md": "docs/", ROOT / "docs" / "performance.md": ""}
"""Pages that show the table, and the folder of docs/ seen from them."""


def main() -> None:
    for page, folder in PAGES.items():
        page.write_text(replaced(page.read_text(), folder))


if __name__ == "__main__":
    main()
