"""Sections one after the other for as long as the time lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.commands import CUT_OFF, DEVICE_LOST, FAILED, HUNG, OK, Outcome, run
from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import Section, Step

# A section is begun if a part of the time it takes on a fast GPU is left.
WORTH_BEGINNING = 0.5
# Seconds to keep for writing results and for ending a command.
RESERVE = 8.0
# How often a command is given again that a kernel ended.
MOST_TIMES = 40
# A command that takes so many times as long as its whole section on a fast GPU hangs, but never before so many seconds.
SLOWEST, SHORTEST = 4.0, 120.0


def run_sections(sections: Sequence[Section], results: Results, budget: float, *, again: bool) -> int:
    """Runs sections within `budget` seconds; the exit status. again: also those that the results have.

    A failure ends nothing but its own step. What was not begun, or was cut off, is listed with the command for it.
    """
    end = time.monotonic() + budget - RESERVE
    results.left = []
    for section in sections:
        known = results.sections.get(section.name)
        if known and known["status"] != CUT_OFF and not again:
            results.log(f"=== {section.name}: {known['status']} before")
            continue
        if end - time.monotonic() < WORTH_BEGINNING * section.seconds:
            results.left.append(section.name)
            continue
        results.log(f"=== {section.name} ({max(0.0, end - time.monotonic()):.0f} s are left)")
        outcomes: list[Outcome] = []
        for outcome in _run_section(section, results, end):
            outcomes.append(outcome)
            # What ends this process, or the loan of its machine, leaves what was found.
            results.add(section.name, outcomes, CUT_OFF)
        results.add(section.name, outcomes, worst([outcome.status for outcome in outcomes]))
        if results.sections[section.name]["status"] == CUT_OFF:
            results.left.append(section.name)
    results.save()
    _tell(results)
    return int(bool(results.failed))


def _run_section(section: Section, results: Results, end: float) -> Iterator[Outcome]:
    for step in section.steps:
        if step.makes is not None and step.makes.exists():
            continue
        for outcome in _run_step(step, max(SHORTEST, SLOWEST * section.seconds), results, end):
            if outcome.status != OK and step.makes is not None:
                step.makes.unlink(missing_ok=True)  # the half of a file
            yield outcome
        if outcome.status == CUT_OFF:
            return


def _run_step(step: Step, patience: float, results: Results, end: float) -> Iterator[Outcome]:
    """A command, again as long as kernels end it and it gets further."""
    for _ in range(MOST_TIMES):
        left, before = end - time.monotonic(), _state(step.keeps)
        if left <= 0:
            yield Outcome(" ".join(step.command), CUT_OFF, 0.0)
            return
        outcome = run(step.command, results.log, limit=left, silence=step.silence, patience=patience)
        yield outcome
        ended = outcome.status == HUNG or outcome.code == DEVICE_LOST or (outcome.code or 0) < 0
        if outcome.status == CUT_OFF or not ended or _state(step.keeps) == before:
            return
        results.log("--- the rest of it in a new process")


def _state(path: Path | None) -> tuple[int, int] | None:
    """Changes whenever a file does."""
    if path is None or not path.exists():
        return None
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def worst(states: Sequence[str]) -> str:
    """The state of a section from those of its commands."""
    return next((state for state in (CUT_OFF, HUNG, FAILED) if state in states), OK)


def _tell(results: Results) -> None:
    page = results.page().split("## Sections")[0].splitlines()[2:]
    for line in (*page, *(f"{name}: {results.sections[name]['status']}" for name in results.failed)):
        results.log(line)
    if results.left:
        results.log(f"left: --sections {','.join(results.left)}")
    results.log(f"results: {results.folder}")
