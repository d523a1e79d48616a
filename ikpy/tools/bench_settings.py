"""What the benchmarks that print tables of growing contexts and batches have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Sizes, threads and placement, shown above the table. ``warmup``: an untimed decode comes first."""

    n_kv_max: int
    n_batch: int
    n_ubatch: int
    flash_attn: bool
    n_gpu_layers: int
    n_threads: int
    n_threads_batch: int
    warmup: bool = True

    def numbers(self) -> dict[str, int]:
        """Names and values of the banner, in its order."""
        names = ("n_kv_max", "n_batch", "n_ubatch", "flash_attn", "n_gpu_layers", "n_threads", "n_threads_batch")
        return {name: int(getattr(self, name)) for name in names}

    def banner(self) -> str:
        """The line above the table."""
        return "main: " + ", ".join(f"{name} = {value}" for name, value in self.numbers().items())


def head_lines(headings: Sequence[str], widths: Sequence[int]) -> tuple[str, str]:
    """Head of a table and the rule below it."""
    cells = [heading.rjust(width) for heading, width in zip(headings, widths, strict=True)]
    rules = ["-" * (width + (1 if index == 0 else 2)) for index, width in enumerate(widths)]
    return f"|{' | '.join(cells)} |", f"|{'|'.join(rules)}|"
