"""--mlock: all memory of weights that the CPU reads is locked."""

from __future__ import annotations

from pathlib import Path

import pytest

import ikpy
from ikpy.engine.context import Context
from ikpy.engine.locking import lock_memory
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.gguf.pages import whole_pages
from tests.cpu.engine.test_loading import PAGE, quantized
from tests.cpu.models.test_prediction_head import glm4moe

TINY = ikpy.default_model_path()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_locked_memory() -> None:
    def locked_kib() -> int:
        (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmLck")]
        return int(line.split()[1])

    lines: list[str] = []
    before = locked_kib()
    model = Model.load(TINY, ModelParams(use_mlock=True), log=lines.append)
    refused = [line for line in lines if "failed to mlock" in line]
    grown = (locked_kib() - before) * 1024
    assert grown >= model.size_bytes or refused, f"{grown} bytes locked and no warning"
    lines.clear()
    lock_memory([(0, 0), (1 << 20, 1 << 46)], lines.append)
    assert len(lines) == 1 and "failed to mlock 70368744177664-byte buffer" in lines[0]


def test_areas_become_whole_pages() -> None:
    areas = [(3 * PAGE, 1), (PAGE + 7, PAGE), (9 * PAGE - 1, 2), (2 * PAGE, 5), (0, 0), (8 * PAGE, PAGE)]
    assert whole_pages(areas) == [(PAGE, 3 * PAGE), (8 * PAGE, 2 * PAGE)]


def test_repacked_weights_are_locked_in_place_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[tuple[int, int]] = []
    monkeypatch.setattr("ikpy.engine.model.lock_memory", lambda areas, log: locked.extend(areas))
    model = Model.load(quantized(tmp_path, "Q4_0"), ModelParams(repack=True, use_mlock=True))
    addresses = {address for address, _ in locked}
    assert addresses == {value.buffer.address for value in model.weights.values()} and model.replaced
    assert not addresses & {model.gguf.address(model.gguf.tensors[name]) for name in model.replaced}
    assert sum(nbytes for _, nbytes in locked) == model.size_bytes


def test_derived_tensors_are_locked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed for the first context, when the rest was locked long ago."""
    model = Model.load(TINY, ModelParams(use_mlock=True))
    locked: list[tuple[int, int]] = []
    monkeypatch.setattr("ikpy.engine.model.lock_memory", lambda areas, log: locked.extend(areas))
    for _ in range(2):
        Context(model, ContextParams(n_ctx=32, n_batch=32))
    assert sum(nbytes for _, nbytes in locked) == model.arch.derived_bytes > 0
    assert {address for address, _ in locked} == {layer.attn.k_b.buffer.address for layer in model.arch.layers}


def test_a_prediction_layer_is_locked_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    monkeypatch.setattr("ikpy.engine.model.lock_memory", lambda areas, log: locked.append(sum(n for _, n in areas)))
    model = Model.load(glm4moe(own_matrices=True).write(tmp_path / "model.gguf"), ModelParams(use_mlock=True))
    model.prediction_head()
    assert len(locked) == 2 and sum(locked) == model.size_bytes
