"""A 9 GB model is mapped, not read: loading costs no memory of its own and waits for no pass over the file."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from benchmarks.shapes import SHAPES
from benchmarks.synthetic import ModelWriter
from ikpy import Context, ContextParams, Model
from ikpy.engine.params import ModelParams
from ikpy.quants import registry


def sparse_model(path: Path, n_bytes: int) -> Path:
    """A llama file of about n_bytes whose tensor data is a hole: complete header, nothing on disk."""
    shape = SHAPES["llama-8b"]
    writer = ModelWriter(str(path), shape, dict.fromkeys(("base", "attn", "experts", "embed"), "q8_0"))
    writer.metadata("llama-8b")
    writer.tensors()
    for name, dims, type_name in writer.pending:
        writer.writer.add_tensor(name, dims, registry.by_name(type_name).id)
    plan = writer.writer.plan()[0]
    writer.writer.abort()
    assert plan.nbytes > n_bytes, "the shape is smaller than asked for"
    path.write_bytes(plan.header)
    os.truncate(path, plan.nbytes)
    return path


def own_bytes() -> int:
    """Memory that only this process has: pages of the file, which come in the background, are not counted."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


@pytest.mark.parametrize("fill", [False, True], ids=["lazy", "in the background"])
def test_loading_nine_gigabytes_maps_them(tmp_path: Path, fill: bool) -> None:
    path = sparse_model(tmp_path / "large.gguf", 8_500_000_000)
    before, all_before = own_bytes(), psutil.Process().memory_info().rss
    model = Model.load(path, ModelParams(fill=fill))
    context = Context(model, ContextParams(n_ctx=256, n_batch=64))
    grown = own_bytes() - before if fill else psutil.Process().memory_info().rss - all_before
    assert model.size_bytes > 8_000_000_000
    assert grown < 400 << 20, f"resident memory grew by {grown >> 20} MiB"
    assert context.kv.nbytes() == 2 * 256 * 8 * 128 * 2 * 32
