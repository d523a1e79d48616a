"""Sections one after the other for as long as the time lasts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.gpu.commands import CUT_OFF, DEVICE_LOST, FAILED, HUNG, OK, Outcome, run
from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import Section, Step

# A section is begun if a part of the time it takes on a fast GPU is left.
WORTH_BEGINNING = 0.5
# Seconds to keep for writing results and for ending a command.
RESERVE = 8.0
# How often a command is given again that a kernel ended.
MOST_TIMES = 40


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
        outcomes = _run_section(section, results, end)
        results.add(section.name, outcomes, worst([outcome.status for outcome in outcomes]))
        if results.sections[section.name]["status"] == CUT_OFF:
            results.left.append(section.name)
    results.save()
    _tell(results)
    return int(bool(results.failed))


def _run_section(section: Section, results: Results, end: float) -> list[Outcome]:
    found: list[Outcome] = []
    for step in section.steps:
        if step.makes is not None and step.makes.exists():
            continue
        found += _run_step(step, results, end)
        if found[-1].status == CUT_OFF:
            break
    return found


def _run_step(step: Step, results: Results, end: float) -> list[Outcome]:
    found: list[Outcome] = []
    for _ in range(MOST_TIMES if step.continued else 1):
        left = end - time.monotonic()
        if left <= 0:
            break
        found.append(run(step.command, results.log, limit=left, silence=step.silence))
        if not (found[-1].status == HUNG or found[-1].code == DEVICE_LOST):
            break
        results.log("--- the rest of it in a new process")
    return found or [Outcome(" ".join(step.command), CUT_OFF, 0.0)]


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
