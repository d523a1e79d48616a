"""Commands with a time limit, whose output is shown and kept as it comes."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

OK, FAILED, CUT_OFF, HUNG = "ok", "failed", "cut off", "hung"
# Status of a process that ended because its GPU takes no work any more: it wants a new process.
DEVICE_LOST = 3
# Lines of output that results keep.
KEPT_LINES = 400
# Seconds between the request to end and the end.
GRACE = 5.0

Log = Callable[[str], None]


@dataclass
class Outcome:
    """What became of a command: OK, FAILED, CUT_OFF (the time was over) or HUNG (it was silent for too long)."""

    command: str
    status: str
    seconds: float
    code: int | None = None
    lines: list[str] = field(default_factory=list)


def run(
    command: Sequence[str],
    log: Log,
    *,
    limit: float,
    silence: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs a command for at most `limit` seconds, and ends it when it prints nothing for `silence` seconds."""
    began = time.monotonic()
    text = shlex.join(command)
    log(f"--- {text}")
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
    except OSError as error:
        log(f"{command[0]} cannot be started: {error.strerror}")
        return Outcome(text, FAILED, 0.0, None, [str(error)])
    lines, status = _read(process, log, began + limit, silence)
    seconds = time.monotonic() - began
    code = process.wait()
    status = status or (FAILED if code else OK)
    if status != OK:
        log(f"--- {status} after {seconds:.0f} s (status {code}): {text}")
    return Outcome(text, status, seconds, code, lines[-KEPT_LINES:])


def _read(process: subprocess.Popen[str], log: Log, end: float, silence: float | None) -> tuple[list[str], str]:
    """Output until the process ends or is ended; then why it was ended."""
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def collect() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            arrived.put(line.rstrip("\n"))
        arrived.put(None)

    threading.Thread(target=collect, daemon=True).start()
    lines: list[str] = []
    while True:
        now = time.monotonic()
        patience = end - now if silence is None else min(end - now, silence)
        try:
            line = arrived.get(timeout=max(patience, 0.01))
        except queue.Empty:
            _end(process)
            return lines, CUT_OFF if time.monotonic() >= end else HUNG
        if line is None:
            return lines, ""
        lines.append(line)
        log(line)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a command and what it started."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
