"""Importance matrix files: reading the legacy ``.dat`` and the GGUF form, and finding the entry of a tensor.

`ikpy.tools.imatrix_data` combines and writes them.

File forms: imatrix.md#file-forms.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.strings import StringArray
from ikpy.gguf.types import MAX_TENSOR_NAME_BYTES

F32 = 0
MAX_COUNT = (1 << 31) - 1
"""Chunks and calls: what the legacy form and quantized models hold."""


@dataclass
class ImportanceMatrix:
    """Mean squared activations per tensor: ``values[name]`` is float32 [ne0 * matrices], all finite.

    ``chunks`` is the number of text chunks behind them, ``dataset`` the name of the text ("" if unknown). ``empty``
    names entries of the file that saw no rows and are left out; ``missing`` holds the number of matrices (experts)
    without rows and of all, for entries where only some have data.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    chunks: int = 0
    dataset: str = ""
    empty: list[str] = field(default_factory=list)
    missing: dict[str, tuple[int, int]] = field(default_factory=dict)

    def find(self, name: str) -> np.ndarray | None:
        """Values for a tensor, from itself or from the tensor that reads the same activations."""
        for candidate in _candidates(name):
            if candidate in self.values:
                return self.values[candidate]
        return None

    def filtered(self, include: Sequence[str], exclude: Sequence[str]) -> ImportanceMatrix:
        """Entries whose name contains one of ``include`` (if any) and none of ``exclude``."""

        def is_kept(name: str) -> bool:
            return (not include or any(part in name for part in include)) and not any(part in name for part in exclude)

        return ImportanceMatrix(
            {name: values for name, values in self.values.items() if is_kept(name)},
            self.chunks,
            self.dataset,
            [name for name in self.empty if is_kept(name)],
            {name: counts for name, counts in self.missing.items() if is_kept(name)},
        )

    def gaps(self) -> list[str]:
        """A line about entries without data and one about experts without, where there are any."""
        lines = []
        if self.empty:
            more = f" (and {len(self.empty) - 1} more)" if len(self.empty) > 1 else ""
            lines.append(f"{self.empty[0]}{more} of the importance matrix saw no tokens and counts as without data")
        if self.missing:
            name, (lacking, total) = max(self.missing.items(), key=lambda item: item[1][0] / item[1][1])
            more = f" (the largest share of {len(self.missing)} such entries)" if len(self.missing) > 1 else ""
            lines.append(
                f"{lacking} of {total} experts of {name} have no data in the importance matrix{more}; "
                "their columns all count the same"
            )
        return lines


@dataclass
class ImatrixRecord:
    """One entry as stored: sums of squares float32 [M, n] over rows float32 [M] (1 and more: experts or heads).

    The legacy form does not say how many matrices an entry has (M = 1, n = all values) nor how many rows were added:
    its rows are the calls.
    """

    name: str
    sums: np.ndarray
    rows: np.ndarray
    calls: int

    def mean(self) -> np.ndarray:
        """Mean squares, float32 [M * n]; 1 for a matrix (an expert) that saw no rows, so all its columns count."""
        rows = self.rows.reshape(-1, 1)
        seen = rows > 0
        mean = np.where(seen, self.sums / np.where(seen, rows, np.float32(1)), np.float32(1))
        return mean.astype(np.float32).reshape(-1)


@dataclass
class ImatrixFile:
    """A file as stored. ``chunks``: text chunks behind it (0 if unknown); ``datasets``: names of the texts."""

    records: list[ImatrixRecord]
    chunks: int = 0
    datasets: list[str] = field(default_factory=list)
    is_gguf: bool = False


def _candidates(name: str) -> Iterator[str]:
    yield name
    for kind in ("ffn_up_exps.weight", "ffn_gate_exps.weight"):
        if name.endswith(kind):
            yield name.removesuffix(kind) + "ffn_gate_up_exps.weight"
            yield name.removesuffix(kind) + "ffn_up_exps.weight"
    for kind, other in (
        ("ffn_gate_up_exps.weight", "ffn_up_exps.weight"),
        ("ffn_gate.weight", "ffn_up.weight"),
        ("ffn_gate_chexps.weight", "ffn_up_chexps.weight"),
        ("attn_v_b.weight", "attn_kv_b.weight"),
        ("attn_kv_b.weight", "attn_v_b.weight"),
    ):
        if name.endswith(kind):
            yield name.removesuffix(kind) + other


def read_imatrix(path: str | Path) -> ImportanceMatrix:
    """Read either file form; UsageError if there is no such file, FileFormatError if it is damaged or without data."""
    file = read_file(path)
    matrix = ImportanceMatrix({}, file.chunks, file.datasets[0] if file.datasets else "")
    for record in file.records:
        lacking = int((record.rows == 0).sum())
        if lacking == len(record.rows):
            matrix.empty.append(record.name)
            continue
        matrix.values[record.name] = record.mean()
        if lacking:
            matrix.missing[record.name] = lacking, len(record.rows)
    if not matrix.values:
        raise FileFormatError(f"load_imatrix: no data in file {path}: none of its entries saw a token")
    return matrix


def is_gguf(path: str | Path) -> bool:
    """Whether a file has the GGUF form; False if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_file(path: str | Path) -> ImatrixFile:
    """The entries of either file form as stored, all finite.

    Raises:
        UsageError: there is no such file.
        FileFormatError: the file is damaged or something else.
    """
    try:
        data = Path(path).read_bytes()
    except OSError:
        raise UsageError(f"load_imatrix: failed to open {path}") from None
    file = _read_gguf(path) if data[:4] == b"GGUF" else _LegacyReader(data, str(path)).read()
    for record in file.records:
        _check_sums(path, record)
    return file


def _check_sums(path: str | Path, record: ImatrixRecord) -> None:
    """Means, not sums, must be finite: those of tiny counts may overflow."""
    _check_finite(path, record.name, record.sums)
    with np.errstate(over="ignore"):
        _check_finite(path, record.name, record.mean())
    if (record.sums < 0).any():
        raise FileFormatError(f"load_imatrix: entry {record.name} in {path} has negative sums of squares")


def _check_finite(path: str | Path, name: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise FileFormatError(f"load_imatrix: values of entry {name} in {path} are not finite numbers")


def _count(gguf: GGUFFile, key: str) -> int:
    """Value of a key, 0 without it."""
    value = gguf.get(key, 0)
    if type(value) is not int:
        raise FileFormatError(f"load_imatrix: {gguf.path}: {key} is not a whole number")
    _check_count(gguf.path, key, value)
    return value


def _check_count(path: str | Path, name: str, value: int) -> None:
    if not 0 <= value <= MAX_COUNT:
        raise FileFormatError(f"load_imatrix: {path}: {name} cannot be {value}, only 0 to {MAX_COUNT}")


class _LegacyReader:
    def __init__(self, data: bytes, path: str):
        self.data, self.path, self.position = data, path, 0

    def _take(self, n: int, problem: str) -> bytes:
        if n < 0 or self.position + n > len(self.data):
            raise FileFormatError(
                f"load_imatrix: {problem} from {self.path}; the file is damaged or no importance matrix"
            )
        self.position += n
        return self.data[self.position - n : self.position]

    def _int(self, problem: str) -> int:
        return int(struct.unpack("<i", self._take(4, problem))[0])

    def read(self) -> ImatrixFile:
        file = ImatrixFile([])
        count = self._int("no data in file, nothing read")
        if count < 1:
            raise FileFormatError(f"load_imatrix: no data in file {self.path}")
        for i in range(1, count + 1):
            file.records.append(self._read_entry(i))
        if len(self.data) - self.position >= 4:
            file.chunks = self._int("failed reading the chunk count")
            _check_count(self.path, "the chunk count", file.chunks)
            if len(self.data) - self.position >= 4:
                length = self._int("failed reading the data set name")
                name = self._take(length, "failed reading the data set name").decode("utf-8", "surrogateescape")
                file.datasets = [name] if name else []
        return file

    def _read_entry(self, i: int) -> ImatrixRecord:
        problem = f"failed reading name for entry {i}"
        length = self._int(problem)
        if length > MAX_TENSOR_NAME_BYTES:
            self._take(-1, problem)
        name = self._take(length, problem).decode("utf-8", "replace")
        calls = self._int(problem)
        problem = f"failed reading number of values for entry {i}"
        n_values = self._int(problem)
        if n_values < 1:
            self._take(-1, problem)
        values = np.frombuffer(self._take(4 * n_values, f"failed reading data for entry {i}"), "<f4")
        calls = calls if calls > 0 else 1  # very old files hold means and no count
        return ImatrixRecord(name, values.reshape(1, -1), np.array([calls], np.float32), calls)


def _read_gguf(path: str | Path) -> ImatrixFile:
    with GGUFFile.open(path) as gguf:
        if gguf.get("general.type") != "imatrix":
            raise FileFormatError(f"load_imatrix: {path} is a GGUF file but not an importance matrix")
        chunks, size = _count(gguf, "imatrix.chunk_count"), _count(gguf, "imatrix.chunk_size")
        names = gguf.get("imatrix.datasets", [])
        file = ImatrixFile([], chunks, names.tolist() if isinstance(names, StringArray) else [], True)
        for name, info in gguf.tensors.items():
            if not name.endswith(".in_sum2"):
                continue
            counts = gguf.tensors.get(name.removesuffix("in_sum2") + "counts")
            if counts is None:
                raise FileFormatError(f"load_imatrix: {path} has no counts for {name}")
            if info.type_id != F32 or counts.type_id != F32:
                raise FileFormatError(f"load_imatrix: {path}: {name} and its counts must be of type f32")
            sums = gguf.data(info).view("<f4").reshape(-1, info.shape[0]).copy()
            rows = gguf.data(counts).view("<f4").reshape(-1).copy()
            if len(rows) != len(sums):
                raise FileFormatError(
                    f"load_imatrix: {path}: {len(rows)} counts for the {len(sums)} matrices of {name}"
                )
            _check_finite(path, name, rows)
            if (rows < 0).any():
                raise FileFormatError(f"load_imatrix: {path}: counts of {name} are negative")
            calls = chunks or round(float(rows.max()) / size if size else 1)
            _check_count(path, f"the number of calls of {name}", max(0, calls))
            file.records.append(ImatrixRecord(name.removesuffix(".in_sum2"), sums, rows, max(1, calls)))
    if not file.records:
        raise FileFormatError(f"load_imatrix: no data in file {path}")
    return file
