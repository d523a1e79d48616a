"""Commands with a time limit, whose output is shown and kept as it comes."""

from __future__ import annotations

import math
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

OK, FAILED, CUT_OFF, HUNG = "ok", "failed", "cut off", "hung"
# Status of a process that ended because its GPU takes no work any more: it wants a new process.
DEVICE_LOST = 3
# Of a command's output: lines that results keep, characters of them, and characters of a line.
KEPT_LINES, KEPT_CHARACTERS, LINE_CHARACTERS = 400, 40_000, 2000
# Seconds between the request to end and the end, and until a process counts as one that a driver does not let go.
GRACE, PATIENCE = 5.0, 30.0

Log = Callable[[str], None]


@dataclass
class Outcome:
    """What became of a command: OK, FAILED, CUT_OFF (the time was over) or HUNG (too long, or silent for too long).

    code: its exit status, negative for a signal.
    """

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
    patience: float = math.inf,
) -> Outcome:
    """Runs a command for at most `limit` seconds, and ends it when it takes longer than `patience` seconds or prints
    nothing for `silence` seconds. Nothing that it started goes on when this returns or is interrupted.
    """
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
            # A group, not a session: what ends this session ends the command too. Python 3.10 has no process_group.
            preexec_fn=os.setpgrp,  # noqa: PLW1509
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    except OSError as error:
        log(f"{command[0]} cannot be started: {error.strerror}")
        return Outcome(text, FAILED, 0.0, None, [str(error)])
    lines, status = _read(process, log, began + limit, began + patience, silence)
    seconds = time.monotonic() - began
    code = _status(process)
    status = status or (HUNG if code is None else FAILED if code else OK)
    if status != OK:
        log(f"--- {status} after {seconds:.0f} s (status {code}): {text}")
    return Outcome(text, status, seconds, code, _kept(lines))


def _kept(lines: Sequence[str]) -> list[str]:
    """The last lines, as many as results keep."""
    room, found = KEPT_CHARACTERS, list[str]()
    for line in reversed(lines[-KEPT_LINES:]):
        room -= len(line)
        if room < 0:
            break
        found.append(line)
    return found[::-1]


def _status(process: subprocess.Popen[str]) -> int | None:
    """The exit status; None: the process does not end, for the driver holds it."""
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return None


def _read(
    process: subprocess.Popen[str], log: Log, end: float, latest: float, silence: float | None
) -> tuple[list[str], str]:
    """Output until the process ends or is ended, at `latest` for taking too long; then why it was ended."""
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def collect() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            arrived.put(line.rstrip("\n")[:LINE_CHARACTERS])
        arrived.put(None)

    threading.Thread(target=collect, daemon=True).start()
    lines: list[str] = []
    try:
        while True:
            patience = min(end, latest) - time.monotonic()
            line = arrived.get(timeout=max(patience if silence is None else min(patience, silence), 0.01))
            if line is None:
                return lines, ""
            lines.append(line)
            log(line)
    except queue.Empty:
        _end(process)
        return lines, CUT_OFF if time.monotonic() >= end else HUNG
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a command and what it started."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, PATIENCE)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
