"""Options of the log; see `ikpy.cli.params`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LogOptions:
    """Amount and place of log output."""

    verbosity: int = 0
    minilog: bool = False
    disable: bool = False
    timings: bool = True
    file: str | None = None
    append: bool = False
    new: bool = False
    prefix: bool = False
    timestamps: bool = False
    colors: bool | None = False
    directory: str | None = None
