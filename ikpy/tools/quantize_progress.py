"""How far a quantization run is: share, rate and time left, as a bar on a terminal or as plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

Print = Callable[[str], None]
MIB = 1 << 20
# Seconds between plain lines.
INTERVAL = 10.0


class Display(Protocol):
    """Where text and progress of a run go. Bytes are those of the input."""

    def write(self, text: str) -> None:
        """Text with its line ends; a line may come in parts."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Work of ``total`` bytes begins, ``done`` of which need no time."""

    def advance(self, nbytes: int) -> None:
        """More bytes are done."""

    def between_lines(self) -> None:
        """No line is open: progress may be printed."""

    def end(self) -> None:
        """The work is over, or failed."""


class PlainDisplay:
    """A line between two tensors every ten seconds; the lines of the tensors stay whole."""

    def __init__(self, write: Print, *, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic):
        self.write = write
        self._interval, self._clock = interval, clock
        self._what = ""
        self._total = self._done = self._skipped = 0
        self._start = self._last = 0.0

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done, self._skipped = what, total, done, done
        self._start = self._last = self._clock()

    def advance(self, nbytes: int) -> None:
        self._done += nbytes

    def between_lines(self) -> None:
        now = self._clock()
        if now - self._last < self._interval or self._done == self._skipped:
            return
        self._last = now
        rate = (self._done - self._skipped) / (now - self._start)
        left = timedelta(seconds=round((self._total - self._done) / rate))
        share = 100 * self._done / max(1, self._total)
        self.write(f"{self._what}: {share:.1f}% done, {rate / MIB:.1f} MiB/s, {left} left\n")

    def end(self) -> None:
        self._what = ""


class TerminalDisplay:
    """A bar with rate and time left below the lines, which are printed when they are complete."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._progress: Progress | None = None
        self._task: int = 0
        self._line = ""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.end()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        self._task = self._progress.add_task(what, total=total, completed=done)
        self._progress.start()

    def write(self, text: str) -> None:
        if self._progress is None:
            self._stream.write(text)
            self._stream.flush()
            return
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._progress.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def advance(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress.advance(self._task, nbytes)  # type: ignore[arg-type]

    def between_lines(self) -> None:
        pass  # the bar needs no lines

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            rest, self._line = self._line, ""
            self.write(rest)


def display_for(stream: TextIO) -> Display:
    """The display that suits a stream."""
    if stream.isatty():
        return TerminalDisplay(stream)

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return PlainDisplay(write)
