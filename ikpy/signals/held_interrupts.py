"""Ctrl-C that waits for a moment when work can be left: shifts of a cache, contexts of devices, captures and events are
never left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Held:
    """Interrupts that arrived while they were held back."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | None) -> None:
        self._handler = handler
        self._arrived: list[tuple[int, FrameType | None]] = []

    def collect(self, number: int, frame: FrameType | None) -> None:
        """The handler meanwhile. A second press acts at once: a device may hang."""
        self._arrived.append((number, frame))
        if len(self._arrived) > 1:
            self.deliver()

    def deliver(self) -> None:
        """Handles what has arrived: for long work, wherever it can stop."""
        while self._arrived and self._handler:
            self._handler(*self._arrived.pop(0))


_around: list[Held] = []
"""That of the block that the main thread is in, if it is in one."""


@contextmanager
def held_back() -> Iterator[Held]:
    """Ctrl-C takes effect when the block ends. Only the main thread is ever interrupted, others go on as they are.

    A block within another one changes nothing. A token enters hundreds, which therefore do not ask for the handler.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield Held(None)
        return
    if _around:
        yield _around[0]
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield Held(None)
        return
    held = Held(handler)
    signal.signal(signal.SIGINT, held.collect)
    try:
        _around.append(held)
        yield held
    finally:
        _around.clear()
        signal.signal(signal.SIGINT, handler)
        held.deliver()
