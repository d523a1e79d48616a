"""SIGTERM and SIGHUP as interruptions, for programs that write files: they tidy up, and save what they have."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class EndSignals:
    """Raises KeyboardInterrupt where a signal arrives; `received` holds the numbers of those that did."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        raise KeyboardInterrupt

    @property
    def status(self) -> int | None:
        """Exit status as a shell gives it to processes that a signal ended; None without one."""
        return 128 + self.received[0] if self.received else None


def count_as_handled() -> None:
    """Lets the exit status count after an interruption that came while source text was run, as dataclasses do.

    CPython remembers such a one, although it was handled, and ends `python -m` by SIGINT instead of with its status;
    the next text that is run makes it forget.
    """
    exec("")


@contextmanager
def as_interruptions() -> Iterator[EndSignals]:
    """Interrupts where one of the signals arrives; one that is ignored, as SIGHUP under nohup, stays ignored. Nothing
    outside the main thread."""
    handler = EndSignals()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, handler)
    try:
        yield handler
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def hangups_passed_over() -> Iterator[None]:
    """SIGHUP does not end the process. Nothing outside the main thread, which gets the signals."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)
