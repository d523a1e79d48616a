"""Importance matrices for tests."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

import ikpy
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.tools.imatrix_data import Entry, ImatrixData
from tests.shared import ROOT

DEMO = ROOT / "ikpy" / "assets" / "demo-text.txt"
MODEL = str(ikpy.default_model_path())


def write_short_text(folder: Path) -> str:
    """A text of about six chunks of 256 tokens; the path."""
    path = folder / "short.txt"
    path.write_text(DEMO.read_text()[:6000])
    return str(path)


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


def write_gguf(path, entries):
    """A GGUF file of entries by name: sums of squares [matrices, n] and counts [matrices]."""
    with GGUFWriter(path) as writer:
        writer.add("general.type", GGUFValueType.STRING, "imatrix")
        writer.add_array("imatrix.datasets", GGUFValueType.STRING, ["text"])
        writer.add("imatrix.chunk_count", GGUFValueType.UINT32, 4)
        writer.add("imatrix.chunk_size", GGUFValueType.UINT32, 512)
        for name, (sums, counts) in entries.items():
            writer.add_tensor(f"{name}.in_sum2", np.shape(sums)[::-1], 0)
            writer.add_tensor(f"{name}.counts", (1, len(counts)), 0)
        for name, (sums, counts) in entries.items():
            writer.write(f"{name}.in_sum2", np.asarray(sums, "<f4"))
            writer.write(f"{name}.counts", np.asarray(counts, "<f4"))
