"""`-thp -rtr`: rearranged weights lie in reserved huge pages, and the model is in memory once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ikpy.engine import model as engine_model
from ikpy.engine.model import Model
from ikpy.engine.params import ModelParams
from ikpy.gguf import huge_pages
from ikpy.gguf.reader import GGUFFile
from tests.cpu.engine.test_loading import PAGE, logits, quantized

PAGE_SIZE = 2 << 20
BOTH = ModelParams(use_mmap=False, huge_pages=True, repack=True)


@pytest.fixture(name="asked")
def fake_pool(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Reserved pages without end, made of others; the list gets the bytes of every request."""
    asked: list[int] = []

    def reserved(size: int) -> tuple[object, int]:
        asked.append(size)
        return huge_pages.private_memory(-(-size // PAGE_SIZE) * PAGE_SIZE), PAGE_SIZE

    monkeypatch.setattr(huge_pages, "reserved_memory", reserved)
    monkeypatch.setattr(engine_model, "fitting_reserved_pages", lambda size: [PAGE_SIZE])
    return asked


def test_only_the_rearranged_weights_are_in_memory(tmp_path: Path, asked: list[int]) -> None:
    path, lines = quantized(tmp_path, "Q4_0"), []
    model = Model.load(path, BOTH, log=lines.append)
    assert "llm_load_tensors: rearranged weights in reserved huge pages of 2 MiB" in lines
    assert len(asked) == 1 and model.replaced and asked[0] >= model.own_bytes
    (shard,) = model.gguf.shards
    assert not shard.mapped and not shard.page_size
    for info in map(model.gguf.tensors.get, model.replaced):  # the file was not read into the memory for it
        start, end = -(-info.offset // PAGE) * PAGE, (info.offset + info.nbytes) // PAGE * PAGE
        assert not shard.data[start:end].any()
    assert (logits(model) == logits(Model.load(path, ModelParams(repack=True)))).all()


def test_pages_that_cannot_be_touched_are_given_back(
    tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free pages may all be on memory nodes that this process must not use: touching them would end it."""

    def refused(*_: object) -> int:
        raise OSError(errno.EFAULT, "Bad address")

    preadv = os.preadv
    block = huge_pages.Block
    path, lines = quantized(tmp_path, "Q4_0"), []

    def block_of_untouchable_pages(*arguments: object, **options: bool) -> huge_pages.Block:
        monkeypatch.setattr(os, "preadv", refused)
        try:
            return block(*arguments, **options)  # type: ignore[arg-type]
        finally:
            monkeypatch.setattr(os, "preadv", preadv)

    monkeypatch.setattr("ikpy.models.weights.Block", block_of_untouchable_pages)
    model = Model.load(path, BOTH, log=lines.append)
    assert asked and model.replaced and not any("reserved" in line for line in lines)
    assert (logits(model) == logits(Model.load(path, ModelParams(repack=True)))).all()


def test_too_few_reserved_pages_leave_everything_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "POOLS", tmp_path / "none")
    path, lines = quantized(tmp_path, "Q4_0"), []
    model = Model.load(path, BOTH, log=lines.append)
    assert model.replaced and not any("reserved" in line for line in lines)
    assert (logits(model) == logits(Model.load(path, ModelParams(repack=True)))).all()


def test_which_reserved_pages_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "POOLS", tmp_path)
    for kib, free in ((2048, 12), (1048576, 1)):
        pool = tmp_path / f"hugepages-{kib}kB"
        pool.mkdir()
        (pool / "free_hugepages").write_text(f"{free}\n")
        (pool / "resv_hugepages").write_text("0\n")
    assert huge_pages.fitting_reserved_pages(24 << 20) == [1 << 30, PAGE_SIZE]
    assert huge_pages.fitting_reserved_pages((24 << 20) + 1) == [1 << 30]
    assert huge_pages.fitting_reserved_pages((1 << 30) + 1) == []


def test_pages_of_the_file_leave_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, released = quantized(tmp_path, "Q4_0"), []
    monkeypatch.setattr(GGUFFile, "release", lambda _, info: released.append(info.name))
    model = Model.load(path, ModelParams(repack=True))
    assert model.replaced and set(released) == model.replaced
