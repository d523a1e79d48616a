"""Processes made by fork: threads of the parent do not live there, and work divided among them would wait forever."""

from __future__ import annotations

import os

from ikpy.errors import UsageError


class _Threads:
    """Whether this process, or the one it was forked from, has contexts with several threads."""

    started = False
    lost = False


def check_threads(n_threads: int) -> None:
    """Raises UsageError for several threads in a process forked from one that had several."""
    if n_threads <= 1:
        return
    if _Threads.lost:
        raise UsageError(
            "this process was forked from one that evaluates with several threads, which it has not: "
            "start processes by spawn or forkserver, or use n_threads=1"
        )
    _Threads.started = True


def _after_fork() -> None:
    _Threads.lost = _Threads.started


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
