"""What was found on a GPU: a JSON file that grows with every step, and a page made of it."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.commands import OK, Outcome

JSON_FILE, PAGE, LOG, TESTS = "results.json", "results.md", "log.txt", "tests.jsonl"
# Lines of a command's output on the page, and of a failed test's message.
PAGE_LINES, MESSAGE_LINES = 60, 3
# What comes later is shown and not kept: the folder is to be copied where files may have 16 MB.
LOG_BYTES = 8 << 20


@dataclass
class Results:
    """The folder of results. A folder with earlier results is continued."""

    folder: Path
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path) -> Results:
        """The results in a folder, which is made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JSON_FILE
        return cls(folder, json.loads(path.read_text())["sections"] if path.exists() else {})

    @property
    def tests(self) -> Path:
        """Where the tests of kernels write a line for each test."""
        return self.folder / TESTS

    def log(self, line: str) -> None:
        """Shows a line and keeps it."""
        print(line, flush=True)
        with (self.folder / LOG).open("a") as file:
            if file.tell() < LOG_BYTES:
                file.write(line + "\n")

    def add(self, section: str, outcomes: Sequence[Outcome], status: str) -> None:
        """Notes what a section found, or has found so far, and writes both files."""
        seconds = sum(outcome.seconds for outcome in outcomes)
        self.sections[section] = {
            "status": status,
            "seconds": round(seconds, 1),
            "steps": [asdict(o) for o in outcomes],
        }
        self.save()

    def save(self) -> None:
        """Writes both files, each whole or not at all."""
        found = {"sections": self.sections, "left": self.left, "tests": read_tests(self.tests), "devices": records()}
        write(self.folder / JSON_FILE, json.dumps(found, indent=1) + "\n")
        write(self.folder / PAGE, self.page())

    def page(self) -> str:
        """Markdown: failures by kernel, then the state of every section, then what they printed."""
        tests = read_tests(self.tests)
        lines = ["# Results on a GPU", "", *failures_by_kernel(tests), "", "## Sections", ""]
        lines += ["| section | state | seconds |", "|---|---|---|"]
        lines += [f"| {name} | {found['status']} | {found['seconds']:.0f} |" for name, found in self.sections.items()]
        lines += [f"| {name} | not run | |" for name in self.left]
        for name, found in self.sections.items():
            lines += ["", f"## {name}"]
            kept = generation_kept([line for step in found["steps"] for line in step["lines"]])
            lines += ["", kept] if kept else []
            for step in found["steps"]:
                lines += ["", f"`{step['command']}`: {step['status']}, {step['seconds']:.0f} s", "", "```"]
                lines += [*step["lines"][-PAGE_LINES:], "```"]
        return "\n".join(lines) + "\n"

    @property
    def failed(self) -> list[str]:
        """Sections that found something wrong."""
        return [name for name, found in self.sections.items() if found["status"] != OK]


def write(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def records() -> list[Any]:
    """What is known of this machine's devices (`ikpy cuda tune`), for the machine may not be there later."""
    from ikpy.backends.cuda.modules import cache_dir  # wants numpy, which `--list` does without

    found = []
    for path in sorted((cache_dir() / "devices").glob("*.json")):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


def read_tests(path: Path) -> list[dict[str, Any]]:
    """Tests of kernels that ended, in order; one that was started and never ended counts as hung."""
    if not path.exists():
        return []
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # the process was ended while it wrote
            continue
        found[entry["id"]] = entry
    return list(found.values())


def generation_kept(lines: Iterable[str]) -> str:
    """What a sweep's rows (tokens of a prompt, generated ones, cells, then times and speeds) say of generation over a
    filled cache; empty without two rows.
    """
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    sweep = [[float(cell) for cell in row] for row in rows if len(row) == 7 and row[0].isdigit()]
    if len(sweep) < 2:
        return ""
    first, last = sweep[0], sweep[-1]
    share = last[6] / first[6]
    return f"Generation over {last[2]:.0f} cells: {share:.0%} of its speed over {first[2]:.0f} (wanted: 60 % at 32k)"


def failures_by_kernel(tests: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table of kernels that failed tests launched: those of which most tests failed come first."""
    ran: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    everything = list(tests)
    for test in everything:
        for kernel in test.get("kernels") or ["(unknown)"]:
            ran[kernel].append(test)
    rows = []
    for kernel, of_kernel in ran.items():
        bad = [test for test in of_kernel if test["status"] not in ("passed", "skipped")]
        if bad:
            rows.append((len(bad) / len(of_kernel), len(bad), len(of_kernel), kernel, bad[0]))
    counts = f"{len(everything)} tests of kernels and models ran"
    if not rows:
        return ["## Failures by kernel", "", f"None; {counts}."]
    lines = [
        "## Failures by kernel",
        "",
        f"{counts}.",
        "",
        "| kernel | failed | first | message |",
        "|---|---|---|---|",
    ]
    for _, n_bad, n, kernel, test in sorted(rows, key=lambda row: (-row[0], -row[1], row[3])):
        message = " ".join(test.get("message", "").splitlines()[:MESSAGE_LINES]).replace("|", "/")
        lines.append(f"| {kernel} | {n_bad} of {n} | {test['id']} ({test['status']}) | {message} |")
    return lines
