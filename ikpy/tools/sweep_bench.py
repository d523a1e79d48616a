"""Speed as a function of context length: rows of prompt processing and generation at growing cache depth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import numpy as np

from ikpy.tools.bench_settings import BenchSettings, head_lines
from ikpy.tools.run_logs import Timings

RANDOM_SEED = 1
HEADINGS = ("PP", "TG", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s")
WIDTHS = (6, 6, 6, 8, 8, 8, 8)
MEMORY_HEADINGS = ("RSS HWM", "VRAM delta")
MEMORY_WIDTH = 10


@dataclass(frozen=True, kw_only=True)
class SweepSettings(BenchSettings):
    """Numbers of a sweep, shown in its banner and in JSON rows."""

    n_generate: int
    stride: int = 1
    n_repetitions: int = 1
    warmup_batch: bool = False
    memory: bool = False

    def depths(self) -> range:
        """Cached lengths of the rows: all multiples of n_ubatch at which a row fits into the context."""
        return range(0, self.n_kv_max - max(self.n_ubatch, self.n_generate) + 1, self.n_ubatch)


@dataclass(frozen=True)
class Row:
    """One measurement: tokens, cached tokens before it, seconds, peak resident MiB."""

    pp: int
    tg: int
    n_kv: int
    t_pp: float
    t_tg: float
    rss_hwm_mib: float | None = None

    @property
    def speed_pp(self) -> float:
        return self.pp / self.t_pp if self.t_pp else 0.0

    @property
    def speed_tg(self) -> float:
        return self.tg / self.t_tg if self.t_tg else 0.0


class Decoder(Protocol):
    """What a sweep needs of a context: decode tokens at a position, cut the cache to a length."""

    def decode(self, tokens: np.ndarray, position: int) -> None: ...

    def trim(self, length: int) -> None: ...


class ContextDecoder:
    """Sequence 0 of an engine context."""

    def __init__(self, context: Any, timings: Timings) -> None:
        self.context = context
        self.timings = timings

    def decode(self, tokens: np.ndarray, position: int) -> None:
        """Decode int32 [n] tokens from `position` on, logits for the last."""
        from ikpy.engine.batch import Batch

        began = time.perf_counter()
        self.context.decode(Batch.single(tokens.tolist(), position), copy=False)
        self.timings.add_decode(len(tokens), time.perf_counter() - began)

    def trim(self, length: int) -> None:
        """Keep the first `length` cells; a checkpoint lets recurrent layers come back to them."""
        if length == 0:
            self.context.kv.clear()
        else:
            self.context.kv.rewind(0, length)
            self.context.kv.keep_checkpoint(0)


class Sweep:
    """Runs the rows of a sweep."""

    def __init__(self, settings: SweepSettings, decoder: Decoder, n_vocab: int, bos: int | None) -> None:
        self.settings = settings
        self.decoder = decoder
        self.n_vocab = n_vocab
        self.bos = bos
        # A fixed seed: every run sees the same tokens.
        self.random = np.random.default_rng(RANDOM_SEED)

    def run(self, show: Callable[[Row], None]) -> None:
        """Measure all rows and pass each to `show`; skipped rows only extend the cache."""
        settings = self.settings
        for index, n_kv in enumerate(settings.depths()):
            if index % settings.stride:
                self.tokens(settings.n_generate)
                self.process(n_kv)
            else:
                repetitions = settings.n_repetitions if n_kv == 0 else 1
                show(self.measure(n_kv, repetitions))

    def warm_up(self) -> None:
        """Untimed decodes before the first row; the cache is empty afterwards."""
        if self.settings.warmup:
            self.decoder.decode(np.array([self.bos or 0], np.int32), 0)
        self.decoder.trim(0)
        if self.settings.warmup_batch:
            self.process(0)
            self.decoder.trim(0)

    def tokens(self, count: int) -> np.ndarray:
        return self.random.integers(0, self.n_vocab, count, dtype=np.int32)

    def measure(self, n_kv: int, repetitions: int) -> Row:
        """Generation at depth `n_kv`, then one physical batch, which stays in the cache."""
        t_tg = t_pp = 0.0
        for _ in range(repetitions):
            self.decoder.trim(n_kv)
            t_tg += self.generate(n_kv)
            self.decoder.trim(n_kv)
            began = time.perf_counter()
            self.process(n_kv)
            t_pp += time.perf_counter() - began
        peak = None
        if self.settings.memory:
            from ikpy.tools.machine import peak_rss_mib

            peak = peak_rss_mib()
        settings = self.settings
        return Row(settings.n_ubatch, settings.n_generate, n_kv, t_pp / repetitions, t_tg / repetitions, peak)

    def generate(self, n_kv: int) -> float:
        """Seconds to decode single tokens from position `n_kv` on."""
        tokens = self.tokens(self.settings.n_generate)
        began = time.perf_counter()
        for index in range(len(tokens)):
            self.decoder.decode(tokens[index : index + 1], n_kv + index)
        return time.perf_counter() - began

    def process(self, n_kv: int) -> None:
        """Decode one physical batch of tokens at position `n_kv`, in pieces of the logical batch."""
        tokens = self.tokens(self.settings.n_ubatch)
        step = self.settings.n_batch
        for start in range(0, len(tokens), step):
            self.decoder.decode(tokens[start : start + step], n_kv + start)


class SweepPrinter:
    """Writes rows as they come; this class prints the table."""

    def __init__(self, settings: SweepSettings, stream: TextIO) -> None:
        self.settings = settings
        self.stream = stream

    def line(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def begin(self) -> None:
        """Banner and table head."""
        headings, widths = list(HEADINGS), list(WIDTHS)
        if self.settings.memory:
            headings += MEMORY_HEADINGS
            widths += [MEMORY_WIDTH] * len(MEMORY_HEADINGS)
        for text in ("", self.settings.banner(), "", *head_lines(headings, widths)):
            self.line(text)

    def row(self, row: Row) -> None:
        """One measurement."""
        text = (
            f"|{row.pp:6} | {row.tg:6} | {row.n_kv:6} | {row.t_pp:8.3f} | {row.speed_pp:8.2f} | "
            f"{row.t_tg:8.3f} | {row.speed_tg:8.2f} |"
        )
        if self.settings.memory:
            peak = "n/a" if row.rss_hwm_mib is None else f"{row.rss_hwm_mib:.1f}"
            text += f" {peak:>10} | {'n/a':>10} |"
        self.line(text)


class SweepCsvPrinter(SweepPrinter):
    """Names, then numbers, separated by commas."""

    def begin(self) -> None:
        names = "pp,tg,n_kv,t_pp,speed_pp,t_tg,speed_tg"
        self.line(names + (",rss_hwm_mib,vram_delta_mib" if self.settings.memory else ""))

    def row(self, row: Row) -> None:
        text = f"{row.pp},{row.tg},{row.n_kv},{row.t_pp:.6f},{row.speed_pp:.6f},{row.t_tg:.6f},{row.speed_tg:.6f}"
        if self.settings.memory:
            text += f",{'' if row.rss_hwm_mib is None else f'{row.rss_hwm_mib:.3f}'},"
        self.line(text)


class SweepJsonPrinter(SweepPrinter):
    """One JSON object per row."""

    def begin(self) -> None:
        """Nothing comes before the rows."""

    def row(self, row: Row) -> None:
        numbers = ", ".join(f'"{name}": {value}' for name, value in self.settings.numbers().items())
        text = (
            f"{{{numbers}, "
            f'"pp": {row.pp}, "tg": {row.tg}, "n_kv": {row.n_kv}, "t_pp": {row.t_pp:f}, '
            f'"speed_pp": {row.speed_pp:f}, "t_tg": {row.t_tg:f}, "speed_tg": {row.speed_tg:f}'
        )
        if self.settings.memory:
            peak = "null" if row.rss_hwm_mib is None else f"{row.rss_hwm_mib:.3f}"
            text += f', "rss_hwm_mib": {peak}, "vram_delta_mib": null'
        self.line(text + " }")


PRINTERS: dict[str, type[SweepPrinter]] = {"md": SweepPrinter, "csv": SweepCsvPrinter, "jsonl": SweepJsonPrinter}
