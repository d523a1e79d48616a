"""Small plans of matrix products: tensor and op records over numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikpy._native import core
from ikpy.graph.plan import OP_DTYPE, TENSOR_DTYPE
from ikpy.quants import by_name, registry

F32 = by_name("F32").id
F16 = by_name("F16").id
I32 = 26
I64 = 27
# Names (in capitals) of the types that are multiplied without decoding rows first.
FAST_TYPES = tuple(row.name.upper() for row in registry.all_types() if core.has_unpacker(row.id))


class Program:
    """Collects records; keeps the arrays they point to alive."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.ops: list[Any] = []
        self.arrays: list[np.ndarray] = []

    def raw(self, data: np.ndarray, type_id: int, ne: tuple[int, ...], nb: tuple[int, ...]) -> int:
        """A tensor record with explicit extents and byte strides."""
        record = np.zeros((), TENSOR_DTYPE)
        record["data"], record["type"] = data.ctypes.data, type_id
        record["ne"] = (*ne, *[1] * (4 - len(ne)))
        record["nb"] = (*nb, *[nb[-1]] * (4 - len(nb)))
        self.arrays.append(data)
        self.tensors.append(record)
        return len(self.tensors) - 1

    def array(self, data: np.ndarray) -> int:
        """A float or int32 array, last axis first in ggml order."""
        type_id = {"float32": F32, "float16": F16, "int32": I32, "int64": I64}[data.dtype.name]
        return self.raw(data, type_id, data.shape[::-1], data.strides[::-1])

    def weight(self, data: np.ndarray, type_name: str, shape: tuple[int, ...]) -> int:
        """Packed rows uint8 [nbytes] of a weight with ggml shape (K, N[, E])."""
        row = by_name(type_name).row_nbytes(shape[0])
        strides = [1, row]
        for extent in shape[1:]:
            strides.append(strides[-1] * extent)
        return self.raw(data, by_name(type_name).id, shape, tuple(strides[:4]))

    def op(self, kind: str, dst: int, src: list[int], ip: dict[int, int] | None = None) -> None:
        """Appends an op record."""
        record = np.zeros((), OP_DTYPE)
        record["kind"], record["dst"] = core.op_kinds()[kind], dst
        record["src"] = [*src, *[-1] * (len(record["src"]) - len(src))]
        for i, value in (ip or {}).items():
            record["ip"][i] = value
        self.ops.append(record)

    def prepared(self, x: np.ndarray, type_name: str, n_rows: int = 1) -> tuple[int, int]:
        """Adds act_prepare for x [T, K] or [B, T, K]; returns (tensor, format). n_rows as of activation_format."""
        fmt = core.activation_format(by_name(type_name).id, n_rows)
        batch = x.shape[0] if x.ndim == 3 else 1
        nbytes = core.activation_nbytes(fmt, x.shape[-1], x.shape[-2], batch)
        padded = np.full(nbytes + 64, 0xAA, np.uint8)
        start = -padded.ctypes.data % 64
        buffer = self.raw(padded[start : start + nbytes], I32, (nbytes,), (1,))
        self.op("act_prepare", buffer, [self.array(x)], {0: fmt})
        return buffer, fmt

    def run(self, n_threads: int = 2) -> None:
        """Runs all ops in order."""
        core.run(np.array(self.tensors, TENSOR_DTYPE), np.array(self.ops, OP_DTYPE), 0, n_threads)
