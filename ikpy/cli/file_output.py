"""What the commands that write files print: plan lines, results, progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ikpy.errors import escaped

if TYPE_CHECKING:
    from ikpy.gguf.writer import ShardPlan


def done(what: str, dry_run: bool) -> str:
    """What happened, or would happen, to a file."""
    return f"dry run, would be {what}" if dry_run else what


def print_line(line: str) -> None:
    """A line of results; control characters and what the terminal's encoding lacks are shown escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(escaped(line).encode(encoding, "backslashreplace").decode(encoding) + "\n")


def print_plan(plan: list[ShardPlan], dry_run: bool) -> None:
    """A line per file."""
    from ikpy.tools.sizes import format_size

    for shard in plan:
        what = f"{len(shard.tensors)} tensors, {format_size(shard.nbytes)}"
        print_line(f"{shard.path}: {what} [{done('written', dry_run)}]")


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of a copy on stderr: a bar on a terminal, a line per tenth otherwise."""
    if not sys.stderr.isatty():
        yield _plain_progress(label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain_progress(label: str) -> Callable[[int, int], None]:
    shown = 0

    def report(done: int, total: int) -> None:
        nonlocal shown
        tenth = done * 10 // total
        if tenth > shown:
            shown = tenth
            sys.stderr.write(f"{label}: {tenth * 10} %\n")

    return report
