"""Log lines of the server, as text or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from typing import IO, TYPE_CHECKING, Any

from ikpy.errors import IkpyError
from ikpy.server.log_writer import LogWriter

if TYPE_CHECKING:
    from ikpy.server.tasks import Timings


class ServerLog:
    """Writes one line per event: structured lines to ``out``, timings to ``err``. None switches a stream off.

    A stream that cannot be written is no error: requests are answered without their lines.
    """

    def __init__(
        self,
        style: str = "text",
        out: IO[str] | None = None,
        err: IO[str] | None = None,
        writer: LogWriter | None = None,
        *,
        shows_timings: bool = True,
    ) -> None:
        self.style = style
        self._out = out
        self._err = err
        self._shows_timings = shows_timings
        self._writer = writer
        """Takes the lines, so that nobody waits for who reads them."""
        self._lock = threading.Lock()

    @classmethod
    def standard(cls, style: str = "text", out: IO[str] | None = None, *, shows_timings: bool = True) -> ServerLog:
        """Log on standard error and, if there is no ``out``, on standard output."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        return cls(style, out or sys.stdout, sys.stderr, LogWriter(), shows_timings=shows_timings)

    def event(self, function: str, message: str, **fields: Any) -> None:
        """An ordinary event."""
        self._write("INFO", function, message, fields)

    def caution(self, function: str, message: str, **fields: Any) -> None:
        """Something that is probably a mistake of a client."""
        self._write("WARN", function, message, fields)

    def failure(self, function: str, message: str, **fields: Any) -> None:
        """Something failed."""
        self._write("ERR", function, message, fields)

    def caught(self, function: str, message: str, error: BaseException, **fields: Any) -> None:
        """Something failed with an error; one that nothing expected is logged with its traceback."""
        if not isinstance(error, IkpyError):
            fields["traceback"] = "".join(traceback.format_exception(error))
        self.failure(function, message, **fields, error=repr(error))

    def timings(self, id_slot: int, id_task: int, t: Timings) -> None:
        """The timing block of a request."""
        if not self._shows_timings:
            return
        total = t.prompt_ms + t.predicted_ms
        self._print(
            self._err,
            f"slot print_timing: id {id_slot:2d} | task {id_task} | \n"
            f"prompt eval time = {_rate(t.prompt_ms, t.prompt_n)}\n"
            f"       eval time = {_rate(t.predicted_ms, t.predicted_n)}\n"
            f"      total time = {total:10.2f} ms / {t.prompt_n + t.predicted_n:5d} tokens",
        )

    def forward(self, line: str, *, error: bool) -> None:
        """A line of another process, as it is."""
        self._print(self._err if error else self._out, line)

    def finish(self) -> None:
        """Waits until all lines are written, but not for long."""
        if self._writer is not None:
            self._writer.finish()

    def _write(self, level: str, function: str, message: str, fields: dict[str, Any]) -> None:
        if self._out is None:
            return
        if self._writer is not None and (n_lines := self._writer.take_lost()):
            self.caution("log", "lines left out that nobody took in time", n_lines=n_lines)
        tid, now = str(threading.get_ident()), int(time.time())
        if self.style == "json":
            head = {"tid": tid, "timestamp": now, "level": level, "function": function, "line": 0, "msg": message}
            self._print(self._out, json.dumps(head | fields, ensure_ascii=False))
            return
        values = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())
        text = f'{level:4s} [{function:>24s}] {message} | tid="{tid}" timestamp={now} {values}'
        self._print(self._out, text.rstrip())

    def _print(self, stream: IO[str] | None, text: str) -> None:
        if stream is None:
            return
        if self._writer is not None:
            self._writer.put(stream, text)
            return
        # Nobody reads the log any more, or the disk is full: the server goes on.
        with self._lock, contextlib.suppress(OSError, ValueError):
            try:
                print(text, file=stream, flush=True)
            except UnicodeEncodeError:
                print(text.encode("ascii", "backslashreplace").decode(), file=stream, flush=True)


def _rate(ms: float, n: int) -> str:
    per_token, per_second = (ms / n, 1e3 * n / ms) if n and ms else (0.0, 0.0)
    return f"{ms:10.2f} ms / {n:5d} tokens ({per_token:8.2f} ms per token, {per_second:8.2f} tokens per second)"
