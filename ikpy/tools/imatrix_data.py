"""What an importance matrix file is made from: files loaded before, plus what a run has collected. Saves both forms.

Files: imatrix.md#file-forms; experts without data: imatrix.md#coverage-of-experts.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, ResourceError, UsageError, escaped
from ikpy.gguf.atomic import AtomicFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.activations import ActivationSums
from ikpy.tools.imatrix_file import F32, MAX_COUNT, ImatrixRecord, read_file

Log = Callable[[str], None]
# Experts without data are tolerated up to this share.
MISSING_SHARE = 0.05


@dataclass
class Entry:
    """Sums of squares of one weight, float64 [M, n], over rows, float64 [M] (experts or heads), in `calls` matmuls."""

    sums: NDArray[np.float64]
    rows: NDArray[np.float64]
    calls: int

    @property
    def n_values(self) -> int:
        """Columns of all matrices."""
        return self.sums.size

    def plus(self, other: Entry, name: str) -> Entry:
        """Sum with an entry of the same size; the finer of the two divisions into matrices is kept.

        Raises:
            UsageError: the sizes differ.
        """
        if self.n_values != other.n_values:
            raise UsageError(_size_problem(name, self.n_values, other.n_values))
        finer = max(self, other, key=lambda entry: len(entry.rows))
        n = len(finer.rows)
        sums = self.sums.reshape(n, -1) + other.sums.reshape(n, -1)
        return Entry(sums, _spread(self.rows, n) + _spread(other.rows, n), self.calls + other.calls)

    def means(self) -> NDArray[np.float64]:
        """Mean squares [M, n]; NaN for matrices without rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.rows[:, None] > 0, self.sums / self.rows[:, None], np.nan)


def _size_problem(name: str, a: int, b: int) -> str:
    return f"Oops: inconsistent size for {name} ({a} vs {b}); importance matrices of different models do not combine"


def _spread(rows: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    if n % len(rows):
        raise UsageError(f"entries of {len(rows)} and {n} matrices cannot be combined")
    return np.repeat(rows, n // len(rows))


@dataclass
class ImatrixData:
    """Statistics per weight: `loaded` from files, `live` growing while a model runs.

    chunk_size: tokens of one decode call. has_call_weights: a loaded file knew calls instead of rows.
    """

    loaded: dict[str, Entry] = field(default_factory=dict)
    live: dict[str, ActivationSums] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    chunks_loaded: int = 0
    chunk_size: int = 0
    has_call_weights: bool = False

    def load(self, path: str, *, by_calls: bool = False) -> None:
        """Adds a file. Its rows are the calls if it is a legacy one; with ``by_calls`` always.

        Raises:
            IkpyError: the file is missing, damaged, or of another model than the ones before.
        """
        file = read_file(path)
        for record in file.records:
            entry = _entry(record, by_calls)
            before = self.loaded.get(record.name)
            self.loaded[record.name] = entry if before is None else before.plus(entry, record.name)
        self.add_datasets(file.datasets)
        self.chunks_loaded += file.chunks
        self.has_call_weights |= not file.is_gguf

    def add_datasets(self, names: list[str]) -> None:
        """Appends names of texts that are not listed yet."""
        self.datasets += [name for name in names if name and name not in self.datasets]

    @property
    def names(self) -> list[str]:
        """Weights with data, loaded ones first."""
        return [*self.loaded, *(name for name in self.live if name not in self.loaded and self.live[name].calls)]

    def entry(self, name: str) -> Entry:
        """Loaded and live statistics of a weight together."""
        live = self.live.get(name)
        if live is None or not live.calls:
            return self.loaded[name]
        current = Entry(live.sums, live.rows, live.calls)
        return self.loaded[name].plus(current, name) if name in self.loaded else current

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Every weight with its statistics, one at a time.

        Raises:
            FileFormatError: an activation was NaN or infinite.
        """
        for name in self.names:
            entry = self.entry(name)
            if not np.isfinite(entry.sums).all():
                raise FileFormatError(f"detected NaNs in {name}; the model file may be damaged")
            yield name, entry

    def check_sizes(self) -> None:
        """Refuses loaded files of another model, before any text is processed.

        Raises:
            UsageError: an entry has another size than its weight in the model.
        """
        for name, sums in self.live.items():
            if name in self.loaded and self.loaded[name].n_values != sums.sums.size:
                raise UsageError(_size_problem(name, self.loaded[name].n_values, sums.sums.size))

    @property
    def last_call(self) -> int:
        """Calls of the weight that was used most, counting loaded ones; 0 before the first decode."""
        calls = [
            sums.calls + (self.loaded[name].calls if name in self.loaded else 0)
            for name, sums in self.live.items()
            if sums.calls
        ]
        return max(calls, default=0)


def _entry(record: ImatrixRecord, by_calls: bool) -> Entry:
    sums, rows = record.sums.astype(np.float64), record.rows.astype(np.float64)
    if by_calls:
        weights = np.where(rows > 0, record.calls / np.where(rows > 0, rows, 1), 0)
        sums, rows = sums * weights[:, None], np.round(rows * weights)
    return Entry(sums, rows, record.calls)


def file_format(path: str, wanted: str) -> str:
    """`dat` or `gguf`: as wanted, with `auto` by the name."""
    if wanted == "auto":
        return "gguf" if path.lower().endswith(".gguf") else "dat"
    return wanted


def save(data: ImatrixData, path: str, fmt: str, *, chunks: int, dataset: str = "", log: Log) -> int:
    """Writes a file in one step (an interrupted write leaves the old file); returns the number of entries stored.

    fmt: dat or gguf. chunks, dataset: for the trailer of the legacy form; the GGUF form lists all data sets.

    Raises:
        UsageError: there is nothing to store, or counts or sums are larger than the file holds.
        ResourceError: the file cannot be written.
    """
    if not data.names:
        raise UsageError("no activations were collected; batches below 16 tokens do not count (-b, -ub)")
    _check_counts(data, chunks)
    try:
        write = _save_gguf if fmt == "gguf" else _save_legacy
        stored = write(data, path, chunks, dataset, log)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}") from None
    if stored < len(data.names):
        log(f"save_imatrix: warning: storing only {stored} out of {len(data.names)} entries")
    return stored


def _check_counts(data: ImatrixData, chunks: int) -> None:
    """Files that were read hold possible counts; their sums may be larger."""
    most = max(chunks, data.chunks_loaded, *(data.entry(name).calls for name in data.names))
    if most > MAX_COUNT:
        raise UsageError(f"{most} chunks or calls are more than a file holds ({MAX_COUNT}); combine fewer files")


def _float32(values: NDArray[np.float64], name: str) -> NDArray[np.float32]:
    if values.max(initial=0) > np.finfo(np.float32).max:
        raise UsageError(
            f"the sums of {name} are larger than a file holds: the model may be damaged, or too many files combined"
        )
    return values.astype("<f4")


def _save_legacy(data: ImatrixData, path: str, chunks: int, dataset: str, log: Log) -> int:
    file = AtomicFile(path)
    try:
        stored = 0
        file.handle.write(struct.pack("<i", 0))
        for name, entry in data.entries():
            missing = missing_matrices(name, entry, log)
            if missing is None:
                continue
            file.handle.write(_legacy_record(name, entry, missing))
            stored += 1
        if stored == 0:
            raise UsageError("no entry has enough data to be stored; give more text")
        text = dataset.encode("utf-8", "surrogateescape")
        file.handle.write(struct.pack("<ii", chunks, len(text)) + text)
        file.handle.seek(0)
        file.handle.write(struct.pack("<i", stored))
        file.finish()
        file.publish()
    finally:
        file.discard()
    return stored


def _legacy_record(name: str, entry: Entry, missing: NDArray[np.intp]) -> bytes:
    rows = entry.rows[:, None].copy()
    sums = entry.sums
    if len(missing):
        sums = sums.copy()
        sums[missing], rows[missing] = 1.0, 1.0
    values = _float32(sums / rows * entry.calls, name)
    text = name.encode()
    return struct.pack("<i", len(text)) + text + struct.pack("<ii", entry.calls, values.size) + values.tobytes()


def missing_matrices(name: str, entry: Entry, log: Log) -> NDArray[np.intp] | None:
    """Matrices without data; None if the legacy form must leave the entry out. Says so."""
    empty = np.flatnonzero(entry.rows <= 0)
    n = len(entry.rows)
    if len(empty) == 0:
        return empty
    if len(empty) == n:
        log(f"save_imatrix: entry '{escaped(name):>40}' has no data - skipping")
        return None
    stored = len(empty) < int(MISSING_SHARE * n + 0.5)  # halves go up: with 50 experts 2 may lack data
    fate = "Storing **but be aware**" if stored else "- skipping"
    log(f"{_partial(name, entry, empty)} {fate}")
    return empty if stored else None


def _partial(name: str, entry: Entry, empty: NDArray[np.intp]) -> str:
    n = len(entry.rows)
    share = 100 * (n - len(empty)) / n
    return (
        f"save_imatrix: entry '{escaped(name):>40}' has partial data ({share:.2f}%) "
        f"{len(empty)} out of {n} experts are missing data"
    )


def _save_gguf(data: ImatrixData, path: str, chunks: int, dataset: str, log: Log) -> int:
    names = sorted(data.names)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(GGUFWriter(os.path.realpath(path)))
        writer.add("general.type", GGUFValueType.STRING, "imatrix")
        writer.add_array("imatrix.datasets", GGUFValueType.STRING, data.datasets or [dataset])
        count = chunks or data.chunks_loaded or max(data.entry(name).calls for name in names)
        writer.add("imatrix.chunk_count", GGUFValueType.UINT32, count)
        writer.add("imatrix.chunk_size", GGUFValueType.UINT32, data.chunk_size)
        for name in names:
            n_matrices, n = data.entry(name).sums.shape
            writer.add_tensor(f"{name}.in_sum2", (n, n_matrices), F32)
            writer.add_tensor(f"{name}.counts", (1, n_matrices), F32)
        for name in names:
            entry = data.entry(name)
            if not np.isfinite(entry.sums).all():
                raise FileFormatError(f"detected NaNs in {name}; the model file may be damaged")
            empty = np.flatnonzero(entry.rows <= 0)
            if len(empty):
                log(f"{_partial(name, entry, empty)} Storing")
            writer.write(f"{name}.in_sum2", _float32(entry.sums, name))
            writer.write(f"{name}.counts", _float32(entry.rows, name))
    return len(names)
