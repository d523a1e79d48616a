"""Standard input and output that no text, no full disk and no slow reader ends a program with."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from typing import Any


class _Output(io.FileIO):
    """The file behind standard output or error. Waits where its reader is slow, also if writing does not block."""

    def write(self, data: Any, /) -> int:
        """All bytes, whose number is returned: of a part, an unbuffered stream (`python -u`) would lose the rest."""
        rest = memoryview(data).cast("B")
        n = rest.nbytes
        while rest:
            written = super().write(rest)
            if written is None:
                select.select([], [self], [])
            else:
                rest = rest[written:]
        return n


class _Results(_Output):
    """Standard output, named in its error: no other file of a message is meant. What follows the error is lost."""

    has_failed = False

    def write(self, data: Any, /) -> int:
        if self.has_failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.has_failed = True  # the flush at exit does not report it once more
            error.filename = "standard output"
            raise


class _Log(_Output):
    """Standard error: lines that it has no room for are lost, the work that they tell about is not."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise  # ends programs of the system, too
        except OSError:
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Keep streams from ending a program: models write any text, and logs outgrow their disks.

    A locale of ASCII alone stands for none, and then texts are UTF-8. Bytes of the input that are no text stay what
    they are, as in arguments. Streams that are closed become empty ones: without standard error, log lines would be
    printed as results.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the whole program
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding=_encoding(sys.stdin), errors="surrogateescape")
    sys.stdout = _with_file(sys.stdout, sys.__stdout__, _Results, "replace")
    sys.stderr = _with_file(sys.stderr, sys.__stderr__, _Log, "backslashreplace")


def _encoding(stream: io.TextIOWrapper) -> str:
    return "utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding


def _with_file(stream: Any, original: Any, kind: type[_Output], errors: str) -> Any:
    """The stream on a file of the kind; one that somebody has put in its place stays on its own."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if stream is not original:
        stream.reconfigure(encoding=_encoding(stream), errors=errors)
        return stream
    stream.flush()
    file = kind(stream.fileno(), "w", closefd=False)
    is_buffered = not isinstance(stream.buffer, io.RawIOBase)
    return io.TextIOWrapper(
        io.BufferedWriter(file) if is_buffered else file,  # type: ignore[arg-type]  # raw with `python -u`
        encoding=_encoding(stream),
        errors=errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
