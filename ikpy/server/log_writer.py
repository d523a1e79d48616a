"""Lines of the log on their way to where they are read, which may take long: a pipe may be full, a disk slow."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
from collections import deque
from typing import IO

MOST_WAITING = 4 << 20
"""Characters of lines that wait to be written; later ones are left out."""
LAST_SECONDS = 2.0
"""How long the end of the program waits for lines that nobody takes."""


class LogWriter:
    """Writes lines in a thread of its own: neither answers nor the event loop wait for who reads the log."""

    def __init__(self) -> None:
        self._lines: deque[tuple[IO[str], str]] = deque()
        self._n_waiting = 0
        """Characters of the lines, the one that is being written included."""
        self._n_lost = 0
        self._change = threading.Condition()
        threading.Thread(target=self._run, name="log", daemon=True).start()
        atexit.register(self.finish)

    def put(self, stream: IO[str], text: str) -> None:
        """Takes a line, if there is room."""
        with self._change:
            if self._n_waiting >= MOST_WAITING:
                self._n_lost += 1
                return
            self._lines.append((stream, text))
            self._n_waiting += len(text)
            self._change.notify_all()

    def take_lost(self) -> int:
        """Number of lines that were left out and not counted yet; 0 while there is little room."""
        with self._change:
            if self._n_waiting > MOST_WAITING // 2:
                return 0
            n, self._n_lost = self._n_lost, 0
            return n

    def finish(self, seconds: float = LAST_SECONDS) -> bool:
        """Waits until all lines are written, but not for long; whether they are."""
        with self._change:
            return self._change.wait_for(lambda: not self._n_waiting, seconds)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._lines)
                stream, text = self._lines.popleft()
            write_line(stream, text)
            with self._change:
                self._n_waiting -= len(text)
                self._change.notify_all()


def write_line(stream: IO[str], text: str) -> None:
    """Writes a line. That nobody reads it any more, or that the disk is full, is no error.

    Files are written past their Python objects, whose locks the interpreter would wait for at its end. A stream with a
    method ``shares`` names several, each with what it gets.
    """
    shares = getattr(stream, "shares", None)
    for file, part in [(stream, f"{text}\n")] if shares is None else shares(f"{text}\n"):
        _write(file, part)


def _write(stream: IO[str], text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        try:
            file = stream.fileno()
        except OSError:  # one in memory
            stream.write(text)
            return
        encoding = getattr(stream, "encoding", None) or "utf-8"
        data = text.replace("\n", os.linesep).encode(encoding, "backslashreplace")
        while data:
            try:
                data = data[os.write(file, data) :]
            except BlockingIOError:  # a full pipe that the program above does not let block
                select.select([], [file], [])
