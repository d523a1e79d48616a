"""Mapped weights come into memory in the background."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ikpy
from ikpy.engine import model as model_module
from ikpy.engine.model import Model
from ikpy.engine.params import ModelParams
from ikpy.gguf import page_fill
from ikpy.gguf.page_fill import PageFill
from ikpy.gguf.pages import whole_pages
from ikpy.graph.placement import EXPERT_NAME
from ikpy.tools.gguf_split import split
from tests.cpu.engine.cold_files import cold_bytes, resident
from tests.cpu.engine.test_loading import quantized

TINY = ikpy.default_model_path()
DEADLINE = 20.0  # seconds
PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(page_fill._advise() is None, reason="Linux only")


def test_areas_come_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of any size, from the middle of a page to that of another."""
    monkeypatch.setattr(page_fill, "STEP", 3 * PAGE)
    data = cold_bytes(tmp_path / "weights", 64 * PAGE)
    first = data.ctypes.data
    areas = [(first + PAGE + 7, 19 * PAGE - 7), (first, 0), (first + 40 * PAGE + 1, PAGE)]
    assert PageFill(whole_pages(areas), data).wait(DEADLINE)
    pages = resident(data)
    assert pages[1:20].all() and pages[40:42].all(), pages


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    """Its threads end, and so does whoever waits for them."""
    path = tmp_path / "weights"
    data = cold_bytes(path, 64 * PAGE)
    os.truncate(path, PAGE)
    assert PageFill([(data.ctypes.data, data.size)], data).wait(DEADLINE)


def test_kernels_that_cannot_do_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = cold_bytes(tmp_path / "weights", 4 * PAGE)
    monkeypatch.setattr(page_fill, "_POPULATE_READ", 1 << 20)
    fill = PageFill([(data.ctypes.data, data.size)], data)
    assert not fill._threads and fill.wait(0) and not resident(data).any()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a model as if it were large."""
    monkeypatch.setattr(model_module, "LEAST_FILLED", 0)
    monkeypatch.setattr("ikpy.machine.numa.nodes", lambda: {0: (0,)})

    def load_model(path: str | Path = TINY, **params: Any) -> Model:
        return Model.load(path, ModelParams(**params))

    return load_model


def filled_bytes(model: Model) -> int:
    """Bytes that are brought into memory."""
    fill = model.gguf._fill
    return sum(nbytes for _, nbytes in fill.areas) if fill else 0


def test_what_a_model_fills(load: Any) -> None:
    """The pages of all tensors or, if those are deferred, of all but the experts'."""
    model = load()
    tensors = list(model.gguf.tensors.values())
    total, experts = (sum(t.nbytes for t in tensors if EXPERT_NAME.match(t.name) or full) for full in (True, False))
    gaps = len(tensors) * 2 * PAGE
    assert 0 <= filled_bytes(model) - total < gaps
    assert model.gguf._fill.wait(DEADLINE)
    for info in tensors:
        start = info.offset // PAGE * PAGE
        assert resident(model.gguf.shards[0].data[start : info.offset + info.nbytes]).all(), info.name
    assert 0 <= filled_bytes(load(defer_experts=True)) - (total - experts) < gaps
    assert 0 < experts < total


def test_split_files_are_filled_in_their_order(load: Any, tmp_path: Path) -> None:
    """Mappings lie in any order."""
    split(str(TINY), str(tmp_path / "model"), max_tensors=12)
    file = load(sorted(tmp_path.iterdir())[0]).gguf
    starts = np.array([shard.data.ctypes.data for shard in file.shards])
    ends = starts + [shard.file_size for shard in file.shards]
    order = [int(np.flatnonzero((starts <= address) & (address < ends))[0]) for address, _ in file._fill.areas]
    assert order == list(range(len(file.shards))) and len(order) > 2


def test_what_is_not_filled(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for params in (
        {"fill": False},
        {"use_mmap": False},
        {"use_mlock": True},
        {"read_ahead": False},
        {"header_only": True},
    ):
        assert load(**params).gguf._fill is None, params
    rearranged = load(quantized(tmp_path, "Q4_0"), repack=True)
    assert filled_bytes(rearranged) < rearranged.size_bytes - rearranged.own_bytes + PAGE * len(rearranged.replaced)
    with monkeypatch.context() as small:
        size = load().size_bytes
        small.setattr(model_module, "available_memory", lambda: size)
        assert load().gguf._fill is not None
        small.setattr(model_module, "available_memory", lambda: size - 1)
        assert load().gguf._fill is None
    with monkeypatch.context() as nodes:
        nodes.setattr("ikpy.machine.numa.nodes", lambda: {0: (0,), 1: (1,)})
        assert load().gguf._fill is None
    monkeypatch.undo()
    assert Model.load(TINY).gguf._fill is None  # too small


def test_it_ends_with_the_model(load: Any) -> None:
    closed, forgotten = load(), load()
    fills = [closed.gguf._fill, forgotten.gguf._fill]
    closed.gguf.close()
    del forgotten
    gc.collect()
    for fill in fills:
        assert fill._stopped.is_set() and fill.wait(DEADLINE)


def test_numbers_stay(load: Any) -> None:
    """Weights that come into memory in the background are those of the file."""
    filled, plain = load(), Model.load(TINY)
    for name, info in plain.gguf.tensors.items():
        np.testing.assert_array_equal(filled.gguf.data(filled.gguf.tensors[name]), plain.gguf.data(info), name)
