"""Which CPUs the threads of computations run on, how urgent they are, and how long they wait actively."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ikpy.errors import UsageError
from ikpy.machine import threads

USUAL_POLL = 50
REAL_TIME = (40, 80, 90)
"""Real-time priorities of the levels 1 to 3, as in ikpy/_native/kernels/affinity.cpp."""
NAMES = ("", "-batch", "-draft", "-batch-draft")
"""Endings of the options of each set: single tokens and more of a model, and of its drafter."""


@dataclass(frozen=True)
class ThreadSet:
    """What holds for the threads of some computations.

    cpus: where they run; () = wherever this process may. strict: each thread has one CPU, in their order; else all have
    all of them. priority: -1 in the background, 0 usual, 1 to 3 real-time. poll: 0 to 100, how long they wait actively.
    """

    cpus: tuple[int, ...] = ()
    strict: bool = False
    priority: int = 0
    poll: int = USUAL_POLL


def use(sets: Sequence[ThreadSet], warn: Callable[[str], None]) -> None:
    """Applies the sets, as many as `NAMES`, to all computations of this process from now on.

    Where real-time threads are not permitted, `warn` gets a line, and the usual priority holds.

    Raises:
        UsageError: CPUs that this process may not use, or a system that binds no threads.
    """
    for ending, own in zip(NAMES, sets, strict=True):
        check_cpus(own.cpus, f"--cpu-mask{ending}, --cpu-range{ending}")
    most = max(own.priority for own in sets)
    problem = why_not_urgent(most) if most > 0 else ""
    if problem:
        warn(f"--prio {most}: real-time threads are not permitted here ({problem}); the usual priority holds")
    from ikpy._native import core

    threads.physical_cores()  # counted before the calling thread is bound to a part of the CPUs
    for number, own in enumerate(sets):
        cpus = own.cpus or threads.usable_cpus()
        groups = [[cpu] for cpu in cpus] if own.strict else [list(cpus)]
        priority = 0 if problem and own.priority > 0 else own.priority
        core.set_thread_set(number, groups, priority, core.USUAL_SPINS * own.poll // USUAL_POLL)


def check_cpus(cpus: Iterable[int], names: str) -> None:
    """UsageError if this process may not use one of the CPUs, or cannot be bound to any."""
    usable = threads.usable_cpus()
    if missing := sorted(set(cpus) - set(usable)):
        raise UsageError(f"{names}: no CPU {as_ranges(missing)} for this process, which may use {as_ranges(usable)}")
    if cpus and not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"{names}: this system does not bind threads to CPUs")


def as_ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order as "0-3,8"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def why_not_urgent(level: int) -> str:
    """What the system says to a thread with the real-time priority of a level; "" if it may have it."""
    if not hasattr(os, "sched_setscheduler"):
        return "unknown on this system"
    problems: list[str] = []

    def ask() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(REAL_TIME[level - 1]))
        except OSError as error:
            problems.append(error.strerror or str(error))

    thread = threading.Thread(target=ask)  # ends with what it asked for
    thread.start()
    thread.join()
    return problems[0] if problems else ""
