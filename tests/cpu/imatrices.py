"""Importance matrices for tests."""

from __future__ import annotations

import struct

import numpy as np

from ikpy.tools.imatrix_data import Entry, ImatrixData


def legacy(*entries: tuple[str, int, list[float]], trailer: bytes = b"") -> bytes:
    """A legacy file, written here byte by byte."""
    data = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        data += np.array(values, "<f4").tobytes()
    return data + trailer


def trailer(chunks: int, dataset: bytes) -> bytes:
    """The end of a legacy file."""
    return struct.pack("<ii", chunks, len(dataset)) + dataset


def partial(n_experts: int, missing: int) -> ImatrixData:
    """Data of a dense tensor and of experts, of which the first ``missing`` have none."""
    rows = np.ones(n_experts) * 3
    rows[:missing] = 0
    sums = np.full((n_experts, 2), 6.0)
    sums[:missing] = 0
    dense = Entry(np.ones((1, 2)), np.ones(1), 1)
    return ImatrixData(loaded={"blk.0.ffn_up_exps.weight": Entry(sums, rows, 5), "blk.0.ffn_up.weight": dense})
