"""What the options of the log make of standard error, and of the lines that a server prints on standard output: a copy
in a file, and lines with level, time and colour."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, cast

from ikpy.errors import UsageError

if TYPE_CHECKING:
    from ikpy.cli.log_options import LogOptions

LEVELS = {
    "E": re.compile(r"(ERR +\[|error\b|\w*: error\b)", re.IGNORECASE),
    "W": re.compile(r"(WARN +\[|warning\b|\w*: warning\b|no effect\b)", re.IGNORECASE),
}
"""Letter -> how lines of this level begin; all others are I."""
COLORS = {"E": "\x1b[31m", "W": "\x1b[35m", "I": ""}
PLAIN = "\x1b[0m"
STARTED = time.monotonic()


class LogStream(io.TextIOBase):
    """A text stream whose lines are marked, and copied to a file without colours."""

    def __init__(self, stream: TextIO, log: LogOptions, file: IO[str] | None) -> None:
        self.stream = stream
        self._options, self._copy = log, file
        self._shows_level, self._shows_time = log.prefix, log.timestamps
        self._colors = stream.isatty() and not os.environ.get("NO_COLOR") if log.colors is None else log.colors
        self._lock = threading.RLock()
        self._in_line = False
        self._color = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self.stream.encoding

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self.stream.isatty()

    def writable(self) -> bool:
        """Always: what a stream or a file has no room for is lost."""
        return True

    def write(self, text: str, /) -> int:
        """Text to both, in which lines may begin or end anywhere; returns its length."""
        with self._lock:
            for stream, part in self.shares(text):
                with contextlib.nullcontext() if stream is self.stream else contextlib.suppress(OSError, ValueError):
                    stream.write(part)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream; the file is written line by line."""
        self.stream.flush()

    def shares(self, text: str) -> list[tuple[IO[str], str]]:
        """The stream and the file, if there is one, each with what it gets of a text."""
        with self._lock:
            parts = list(self._marked(text))
        shown = "".join(color + mark + part + (PLAIN if color else "") for color, mark, part in parts)
        if self._copy is None:
            return [(self.stream, shown)]
        return [(self.stream, shown), (self._copy, "".join(mark + part for _, mark, part in parts))]

    def sibling(self, stream: TextIO, *, plain: bool) -> LogStream:
        """Another stream with the same file, and the same marks or none."""
        options = replace(self._options, prefix=False, timestamps=False, colors=False) if plain else self._options
        return LogStream(stream, options, self._copy)

    def close_file(self) -> None:
        """Closes the file; the stream stays open."""
        if self._copy is not None:
            with contextlib.suppress(OSError):
                self._copy.close()

    def _marked(self, text: str) -> Iterator[tuple[str, str, str]]:
        """Colour, mark and text of every piece of a line."""
        for part in text.splitlines(keepends=True):
            mark = ""
            if not self._in_line:
                level = next((name for name, start in LEVELS.items() if start.match(part)), "I")
                self._color = COLORS[level] if self._colors else ""
                mark = self._mark(level) if part.strip() else ""
            self._in_line = not part.endswith("\n")
            yield self._color, mark, part

    def _mark(self, level: str) -> str:
        """Minutes, seconds, milliseconds and microseconds since the start, and the letter of the level."""
        micros = int(1e6 * (time.monotonic() - STARTED))
        minutes, seconds = divmod(micros // 1_000_000, 60)
        clock = (
            f"{minutes}.{seconds:02d}.{micros // 1000 % 1000:03d}.{micros % 1000:03d} "
            if self._options.timestamps
            else ""
        )
        return clock + (f"{level} " if self._shows_level else "")


def new_name(path: Path) -> Path:
    """The first of name.1.ending, name.2.ending, ... that does not exist."""
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free


def open_log(options: LogOptions) -> IO[str] | None:
    """The file of --log-file, if there is one.

    Raises:
        UsageError: it cannot be written, or is a model.
    """
    if options.file is None:
        return None
    from ikpy.gguf.types import MAGIC

    path = Path(options.file)
    try:
        if path.is_file():
            with open(path, "rb") as stream:
                if stream.read(len(MAGIC)) == MAGIC:
                    raise UsageError(f"--log-file {path}: a GGUF file is not overwritten")
        while True:
            name, mode = (new_name(path), "x") if options.new else (path, "a" if options.append else "w")
            with contextlib.suppress(FileExistsError):  # another run was faster
                return open(name, mode, buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"--log-file {path}: {error.strerror}") from error


def install(options: LogOptions) -> None:
    """Put a `LogStream` in the place of standard error where an option asks for one."""
    remove()
    file = open_log(options)
    if file or options.prefix or options.timestamps or options.colors is not False:
        sys.stderr = LogStream(sys.stderr, options, file)


def beside(stream: TextIO, *, plain: bool = False) -> TextIO:
    """The stream with the file of standard error and, unless lines have a form of their own, with its marks: for lines
    of a log that go elsewhere."""
    if not isinstance(sys.stderr, LogStream):
        return stream
    return cast(TextIO, sys.stderr.sibling(stream, plain=plain))


def remove() -> None:
    """Take back what `install` did."""
    if isinstance(sys.stderr, LogStream):
        log, sys.stderr = sys.stderr, sys.stderr.stream
        log.close_file()
