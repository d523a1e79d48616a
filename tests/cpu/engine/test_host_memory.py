"""What loading takes of the machine's memory: files that are read in parts, models larger than it."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest

import ikpy
from ikpy.engine import memory
from ikpy.engine.memory import MemoryReport
from ikpy.engine.model import Model
from ikpy.engine.params import ModelParams
from ikpy.errors import ResourceError
from ikpy.gguf.file_bytes import areas_without
from ikpy.gguf.huge_pages import private_memory
from ikpy.gguf.reader import GGUFFile
from ikpy.machine import memory as machine_memory
from ikpy.tools.gguf_split import split
from scripts.make_deepseek_header import write_header

TINY = ikpy.default_model_path()
PAGE = mmap.PAGESIZE


def test_areas_leave_out_whole_pages() -> None:
    assert areas_without(5 * PAGE + 7, []) == [(0, 5 * PAGE + 7)]
    holes = [(10, PAGE), (PAGE + 1, 3 * PAGE), (3 * PAGE, 4 * PAGE + 9), (5 * PAGE, 5 * PAGE + 7)]
    assert areas_without(5 * PAGE + 7, holes) == [(0, 2 * PAGE), (4 * PAGE, 5 * PAGE + 7)]
    assert areas_without(2 * PAGE, [(0, 2 * PAGE)]) == []


def test_tensors_that_are_not_wanted_stay_in_the_file(tmp_path: Path) -> None:
    source = tmp_path / "whole.gguf"
    source.write_bytes(TINY.read_bytes())
    split(str(source), str(tmp_path / "part"), max_tensors=20)
    first = min(tmp_path.glob("part-00001-of-*.gguf"))
    shares: list[float] = []
    with (
        GGUFFile.open(first) as whole,
        GGUFFile.open(
            first,
            use_mmap=False,
            wanted=lambda file: {n for n in file.tensors if "exps" not in n},
            progress=shares.append,
        ) as file,
    ):
        assert shares == sorted(shares) and shares[-1] == 1
        for shard in file.shards:
            experts = [info for name, info in file.tensors.items() if info.shard == shard.index and "exps" in name]
            for info in experts:  # the memory was never touched
                start, end = -(-info.offset // PAGE) * PAGE, (info.offset + info.nbytes) // PAGE * PAGE
                assert not shard.data[start:end].any() and end > start
        for _ in range(2):
            for name, info in whole.tensors.items():
                assert (file.data(info) == whole.data(info)).all(), name
                file.release(info)
        assert file.get("general.name") == whole.get("general.name") and file.shards[1].metadata.keys()


def test_memory_for_a_file_may_exceed_the_machine() -> None:
    """Of a file of hundreds of gigabytes the CPU may want few."""
    memory = private_memory(4 * machine_memory.machine_memory())
    memory[-1] = 1
    memory.close()


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (ModelParams(repack=True), "weights that -rtr rearranges take 3[0-9.]+ GiB.*ikpy quantize --repack"),
        (ModelParams(use_mmap=False), "reading .*deepseek.gguf takes 3[0-9.]+ GiB.*without --no-mmap"),
    ],
)
def test_models_larger_than_the_machine_are_refused_at_once(
    params: ModelParams, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would end the process, minutes later and without a word."""
    path = tmp_path / "deepseek.gguf"
    write_header(str(path), "q8_0", experts="iq4_ks")
    monkeypatch.setattr(machine_memory, "machine_memory", lambda **_: 256 << 30)
    with pytest.raises(ResourceError, match=re.compile(reason)):
        Model.load(path, params)


def test_a_plan_says_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = 24 << 30  # that of a virtual machine changes
    monkeypatch.setattr(memory, "machine_memory", lambda **_: machine)
    report = MemoryReport(free={"CUDA0": 100 << 20, "CUDA1": 100 << 20})
    report.add("CUDA0", "mapped", 100 << 20)
    report.add("CUDA1", "mapped", 100 << 20)
    report.add("CUDA1", "KV cache", 7 << 20)
    report.add("CPU", "mapped", machine // 2)
    assert report.shortages() == ["warning: CUDA1: 107 MiB are needed, 100 MiB are free"]
    report.add("CPU", "mapped", machine)
    assert re.search(r"the machine has \d+ MiB: weights will be read from the disk again", report.lines()[-1])
    report.is_mapped = False
    assert report.lines()[-1].endswith(f" MiB are needed, the machine has {machine >> 20} MiB")
