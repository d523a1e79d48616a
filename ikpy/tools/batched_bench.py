"""Speed of several sequences at once: their prompts, then one token of each per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.batch import Batch
from ikpy.tools.bench_settings import BenchSettings, head_lines
from ikpy.tools.run_logs import Timings

RANDOM_SEED = 1
N_WARM_UP = 16
HEADINGS = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")
WIDTHS = (6, 6, 4, 6, 8, 8, 8, 8, 8, 8)


@dataclass(frozen=True, kw_only=True)
class BatchedSettings(BenchSettings):
    """Lists of prompt tokens, generated tokens and sequences, of which all combinations run; ``shared``: all sequences
    begin with one prompt; ``separate``: one is generated after the other."""

    shared: bool
    separate: bool = False
    n_prompt: tuple[int, ...]
    n_generate: tuple[int, ...]
    n_sequences: tuple[int, ...]

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """All combinations of prompt tokens, generated tokens, sequences."""
        return product(self.n_prompt, self.n_generate, self.n_sequences)

    def n_kv(self, pp: int, tg: int, pl: int) -> int:
        """Cells that a row fills; a shared prompt counts once."""
        return pp + pl * tg if self.shared else pl * (pp + tg)

    def numbers(self) -> dict[str, int]:
        found = {}
        for name, value in super().numbers().items():
            found[name] = value
            if name == "flash_attn":
                found["is_pp_shared"] = int(self.shared)
                if self.separate:
                    found["is_tg_separate"] = 1
        return found


@dataclass(frozen=True)
class BatchedRow:
    """One measurement: prompt and generated tokens per sequence, sequences, cells, seconds."""

    pp: int
    tg: int
    pl: int
    n_kv: int
    n_prompt: int
    """Prompt tokens that were evaluated."""
    t_pp: float
    t_tg: float

    @property
    def t(self) -> float:
        """Seconds of both parts."""
        return self.t_pp + self.t_tg

    @property
    def speeds(self) -> tuple[float, float, float]:
        """Tokens per second of the prompts, of the generation, and cells per second of both."""
        return rate(self.n_prompt, self.t_pp), rate(self.pl * self.tg, self.t_tg), rate(self.n_kv, self.t)

    def numbers(self) -> dict[str, str]:
        """Names and values of the record of this row."""
        speed_pp, speed_tg, speed = self.speeds
        counts = {"pp": self.pp, "tg": self.tg, "pl": self.pl, "n_kv": self.n_kv}
        times = {"t_pp": self.t_pp, "speed_pp": speed_pp, "t_tg": self.t_tg, "speed_tg": speed_tg}
        times |= {"t": self.t, "speed": speed}
        return {name: str(count) for name, count in counts.items()} | {name: f"{x:f}" for name, x in times.items()}

    def line(self) -> str:
        """The row of the table."""
        speed_pp, speed_tg, speed = self.speeds
        return (
            f"|{self.pp:6} | {self.tg:6} | {self.pl:4} | {self.n_kv:6} | {self.t_pp:8.3f} | {speed_pp:8.2f} | "
            f"{self.t_tg:8.3f} | {speed_tg:8.2f} | {self.t:8.3f} | {speed:8.2f} |"
        )


def rate(n: int, seconds: float) -> float:
    """Tokens per second; 0 where nothing ran."""
    return n / seconds if seconds else 0.0


@dataclass(frozen=True)
class Form:
    """How rows are written: the lines before them, and the line of one."""

    head: Callable[[BatchedSettings], Sequence[str]]
    row: Callable[[BatchedSettings, BatchedRow], str]


def table_head(settings: BatchedSettings) -> Sequence[str]:
    """Banner and head of the table."""
    return "", settings.banner(), "", *head_lines(HEADINGS, WIDTHS)


def csv_head(settings: BatchedSettings) -> Sequence[str]:
    """Names of the columns."""
    return (",".join(BatchedRow(1, 1, 1, 2, 1, 0.0, 0.0).numbers()),)


def json_row(settings: BatchedSettings, row: BatchedRow) -> str:
    """An object of the settings and the row, as llama-batched-bench writes it."""
    fields = settings.numbers() | row.numbers()
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


FORMS = {
    "md": Form(table_head, lambda settings, row: row.line()),
    "csv": Form(csv_head, lambda settings, row: ",".join(row.numbers().values())),
    "jsonl": Form(lambda settings: (), json_row),
}


class BatchedBench:
    """Measures the rows in a context that has a sequence for each of the largest number."""

    def __init__(self, settings: BatchedSettings, context: Any, timings: Timings) -> None:
        self.settings = settings
        self.context = context
        self.timings = timings
        # A fixed seed: every run sees the same tokens.
        self.random = np.random.default_rng(RANDOM_SEED)

    def run(self, form: Form, stream: TextIO, log: Callable[[str], None]) -> None:
        """Write the rows to ``stream`` and what is left out to ``log``."""
        for line in form.head(self.settings):
            print(line, file=stream, flush=True)
        for pp, tg, pl in self.settings.rows():
            n_kv = self.settings.n_kv(pp, tg, pl)
            if n_kv > self.settings.n_kv_max:
                log(f"PP {pp}, TG {tg}, B {pl} needs {n_kv} cells: it does not fit into -c {self.settings.n_kv_max}")
                continue
            print(form.row(self.settings, self.measure(pp, tg, pl)), file=stream, flush=True)

    def warm_up(self) -> None:
        """An untimed decode; the cache is empty afterwards."""
        if self.settings.warmup:
            self.decode(np.arange(N_WARM_UP), np.zeros(N_WARM_UP, np.int64))
        self.context.kv.clear()

    def measure(self, pp: int, tg: int, pl: int) -> BatchedRow:
        """The prompts of all sequences (or the one they share), then ``tg`` steps of a token per sequence, of all
        together or of one after the other."""
        self.context.kv.clear()
        n = 1 if self.settings.shared else pl
        began = time.perf_counter()
        self.decode(np.tile(np.arange(pp), n), np.repeat(np.arange(n), pp))
        for sequence in range(n, pl):
            self.context.kv.seq_cp(0, sequence)
        prompted = time.perf_counter()
        groups = np.arange(pl).reshape(-1, 1) if self.settings.separate else np.arange(pl).reshape(1, -1)
        for group in groups:
            for step in range(tg):
                self.decode(np.full(len(group), pp + step), group)
        ended = time.perf_counter()
        n_kv = self.settings.n_kv(pp, tg, pl)
        return BatchedRow(pp, tg, pl, n_kv, n * pp, prompted - began, ended - prompted)

    def decode(self, positions: NDArray[np.int64], sequences: NDArray[np.int64]) -> None:
        """Decode random tokens at these places, in logical batches, with logits for the last of each sequence."""
        last = np.append(sequences[1:] != sequences[:-1], True)
        tokens = self.random.integers(0, self.context.model.hparams.n_vocab, len(positions), dtype=np.int32)
        for start in range(0, len(positions), self.settings.n_batch):
            part = slice(start, start + self.settings.n_batch)
            began = time.perf_counter()
            batch = Batch(tokens[part], positions[part], sequences[part].tolist(), last[part])
            self.context.decode(batch, copy=False)
            self.timings.add_decode(len(tokens[part]), time.perf_counter() - began)
