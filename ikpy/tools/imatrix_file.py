"""Importance matrix files: reading the legacy ``.dat`` and the GGUF form, and finding the entry of a tensor.

File format: tools 3.6; lookup: tools 2.8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.reader import GGUFFile

_MAX_NAME = 1 << 16


@dataclass
class ImportanceMatrix:
    """Mean squared activations per tensor: ``values[name]`` is float32 [ne0 * matrices], all finite.

    ``chunks`` is the number of text chunks behind them, ``dataset`` the name of the text ("" if unknown).
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    chunks: int = 0
    dataset: str = ""

    def find(self, name: str) -> np.ndarray | None:
        """Values for a tensor, from itself or from the tensor that reads the same activations."""
        for candidate in _candidates(name):
            if candidate in self.values:
                return self.values[candidate]
        return None

    def filtered(self, include: Sequence[str], exclude: Sequence[str]) -> ImportanceMatrix:
        """Entries whose name contains one of ``include`` (if any) and none of ``exclude``."""
        kept = {
            name: v
            for name, v in self.values.items()
            if (not include or any(part in name for part in include)) and not any(part in name for part in exclude)
        }
        return ImportanceMatrix(kept, self.chunks, self.dataset)


def _candidates(name: str) -> Iterator[str]:
    yield name
    for kind in ("ffn_up_exps.weight", "ffn_gate_exps.weight"):
        if name.endswith(kind):
            yield name.removesuffix(kind) + "ffn_gate_up_exps.weight"
            yield name.removesuffix(kind) + "ffn_up_exps.weight"
    for kind, other in (
        ("ffn_gate_up_exps.weight", "ffn_up_exps.weight"),
        ("ffn_gate.weight", "ffn_up.weight"),
        ("attn_v_b.weight", "attn_kv_b.weight"),
        ("attn_kv_b.weight", "attn_v_b.weight"),
    ):
        if name.endswith(kind):
            yield name.removesuffix(kind) + other


def read_imatrix(path: str | Path) -> ImportanceMatrix:
    """Read either file form; UsageError if there is no such file, FileFormatError if it is damaged."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        raise UsageError(f"load_imatrix: failed to open {path}") from None
    matrix = _read_gguf(path) if data[:4] == b"GGUF" else _LegacyReader(data, str(path)).read()
    for name, values in matrix.values.items():
        if not np.isfinite(values).all():
            raise FileFormatError(f"load_imatrix: values of entry {name} in {path} are not finite numbers")
    return matrix


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

    def read(self) -> ImportanceMatrix:
        matrix = ImportanceMatrix()
        count = self._int("no data in file, nothing read")
        if count < 1:
            raise FileFormatError(f"load_imatrix: no data in file {self.path}")
        for i in range(1, count + 1):
            self._read_entry(matrix, i)
        if len(self.data) - self.position >= 4:
            matrix.chunks = self._int("failed reading the chunk count")
            if len(self.data) - self.position >= 4:
                length = self._int("failed reading the data set name")
                matrix.dataset = self._take(length, "failed reading the data set name").decode("utf-8", "replace")
        return matrix

    def _read_entry(self, matrix: ImportanceMatrix, i: int) -> None:
        problem = f"failed reading name for entry {i}"
        length = self._int(problem)
        if length > _MAX_NAME:
            self._take(-1, problem)
        name = self._take(length, problem).decode("utf-8", "replace")
        calls = self._int(problem)
        problem = f"failed reading number of values for entry {i}"
        n_values = self._int(problem)
        if n_values < 1:
            self._take(-1, problem)
        values = np.frombuffer(self._take(4 * n_values, f"failed reading data for entry {i}"), "<f4")
        matrix.values[name] = values / np.float32(calls) if calls > 0 else values.copy()


def _read_gguf(path: str | Path) -> ImportanceMatrix:
    with GGUFFile.open(path) as file:
        if file.get("general.type") != "imatrix":
            raise FileFormatError(f"load_imatrix: {path} is a GGUF file but not an importance matrix")
        datasets = file.get("imatrix.datasets", [])
        matrix = ImportanceMatrix(
            {}, int(file.get("imatrix.chunk_count", 0)), str(datasets[0]) if len(datasets) else ""
        )
        for name, info in file.tensors.items():
            if not name.endswith(".in_sum2"):
                continue
            counts = file.tensors.get(name.removesuffix("in_sum2") + "counts")
            if counts is None:
                raise FileFormatError(f"load_imatrix: {path} has no counts for {name}")
            sums = file.data(info).view("<f4").reshape(-1, info.shape[0])
            rows = file.data(counts).view("<f4").reshape(-1, 1)
            if len(rows) != len(sums):
                raise FileFormatError(
                    f"load_imatrix: {path}: {len(rows)} counts for the {len(sums)} matrices of {name}"
                )
            seen = rows > 0  # an expert that saw no text has no statistics: all its columns count the same
            mean = np.where(seen, sums / np.where(seen, rows, 1), np.float32(1))
            matrix.values[name.removesuffix(".in_sum2")] = mean.astype(np.float32).reshape(-1)
    if not matrix.values:
        raise FileFormatError(f"load_imatrix: no data in file {path}")
    return matrix
