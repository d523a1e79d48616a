"""`ikpy quantize` killed, interrupted and out of space: the output is the old file or the whole new one."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ikpy.cli.quantize import run
from ikpy.gguf import disk_space
from ikpy.tools.resumable import ResumableOutput
from tests.cpu.quantize.interrupted_runs import OLD, leftovers, start, wait_for_data, write_model


@pytest.fixture(scope="module")
def processes():
    """Processes that start at once, with the program loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ikpy.cli.quantize", "ikpy.tools.quantize", "ikpy._native"])
    return context


@pytest.mark.parametrize(("shards", "n_kills"), [(1, 20), (3, 10)])
def test_killed_at_random_moments(processes, tmp_path, shards, n_kills):
    """After every kill the outputs are untouched or complete, and the last run's are those of an undisturbed one."""
    source = write_model(tmp_path / ("in" if shards > 1 else "in.gguf"), shards=shards, n_tensors=12)
    whole, target = tmp_path / "whole", tmp_path / "new"
    whole.mkdir()
    target.mkdir()
    options = ["--pure", *(["--keep-split"] if shards > 1 else []), source]
    start(processes, ["--help"], tmp_path / "log").join()  # the server of processes is up now
    process = start(processes, [*options, str(whole / "m.gguf"), "IQ3_K", "1"], tmp_path / "log")
    wait_for_data(process, whole)
    began = time.monotonic()
    process.join()
    duration = time.monotonic() - began
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    expected = {p.name: p.read_bytes() for p in whole.iterdir()}
    assert len(expected) == shards
    rng = random.Random(8)
    log = tmp_path / "log"
    log.unlink()
    kills = finished = 0
    for name in expected:
        (target / name).write_bytes(OLD)
    while kills < n_kills or not finished:
        process = start(processes, [*options, str(target / "m.gguf"), "IQ3_K", "1"], log)
        if kills < n_kills:
            if kills % 4:  # the others may die before they write anything
                wait_for_data(process, target)
            process.join(rng.uniform(0.0, 0.8) * duration)
        else:
            process.join()
        if process.exitcode is None:
            process.kill()  # no error if it has ended in between
            process.join()
            kills += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            finished += 1
            assert {p.name: p.read_bytes() for p in target.iterdir()} == expected
            for name in expected:
                (target / name).write_bytes(OLD)
            continue
        assert process.exitcode == -signal.SIGKILL, log.read_text()[-600:]
        for name, content in expected.items():
            found = (target / name).read_bytes() if (target / name).exists() else None
            # Only while several files change their names the first of them may be missing.
            assert found in (OLD, content) or (found is None and shards > 1 and name.startswith("m-00001")), name
    resumed = log.read_text().count("going on with the unfinished")
    print(f"{shards} files: {kills} kills, {resumed} runs went on, {finished} came to the end")
    assert resumed >= 5


def test_another_request_starts_over(processes, tmp_path, capfd):
    source = write_model(tmp_path / "in.gguf")
    target = tmp_path / "out.gguf"
    log = tmp_path / "log"
    process = start(processes, ["--pure", source, str(target), "IQ3_K", "1"], log, file_limit=60_000)
    process.join()
    assert process.exitcode == 1
    assert leftovers(tmp_path) == [".out.gguf.journal", ".out.gguf.part"]
    assert run(["--pure", source, str(target), "Q8_0"]) == 0
    assert "going on" not in capfd.readouterr().err
    assert leftovers(tmp_path) == []
    assert run(["--pure", source, str(tmp_path / "again.gguf"), "Q8_0"]) == 0
    assert target.read_bytes() == (tmp_path / "again.gguf").read_bytes()


def test_no_space(processes, tmp_path, capfd):
    """One clear line; with room the same command goes on and makes the file of an undisturbed run."""
    source = write_model(tmp_path / "in.gguf")
    target, log = tmp_path / "out.gguf", tmp_path / "log"
    target.write_bytes(OLD)
    process = start(processes, ["--pure", source, str(target), "IQ3_K", "1"], log, file_limit=100_000)
    process.join()
    assert process.exitcode == 1
    lines = [line for line in log.read_text().splitlines() if "failed to quantize: " in line]
    assert len(lines) == 1
    assert f"{target}: cannot write: File too large; make room and run the same command again to go on" in lines[0]
    assert target.read_bytes() == OLD
    log.unlink()
    process = start(processes, ["--pure", source, str(target), "IQ3_K", "1"], log)
    process.join()
    assert process.exitcode == 0
    assert "going on with the unfinished" in log.read_text()
    process = start(processes, ["--pure", source, str(tmp_path / "whole.gguf"), "IQ3_K", "1"], log)
    process.join()
    assert target.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_too_little_free_space_is_found_before_the_work(tmp_path, monkeypatch, capfd):
    source = write_model(tmp_path / "in.gguf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert run(["--dry-run", "--pure", source, str(tmp_path / "out.gguf"), "Q8_0"]) == 0
    assert "this is not enough" in capfd.readouterr().err
    assert run(["--pure", source, str(tmp_path / "out.gguf"), "Q8_0"]) == 1
    err = capfd.readouterr().err
    assert f"more of disk space but only 0.001 MiB are free in {tmp_path}\n" in err
    assert "converting" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"], "there is nothing to go on with"


def test_space_is_looked_for_where_links_point(tmp_path, monkeypatch, capfd):
    """Parts on two other file systems: the one that they are named on has no room, and the second one too little."""
    source = write_model(tmp_path / "in", shards=3)
    for index, disk in enumerate(("big", "big", "small")):
        (tmp_path / disk).mkdir(exist_ok=True)
        (tmp_path / f"out-{index + 1:05d}-of-00003.gguf").symlink_to(tmp_path / disk / f"{index}.gguf")
    free = {"big": 1 << 40, "small": 1000}
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk_space, "_device", lambda folder: ["big", "small"].index(folder.name))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=free[Path(folder).name]))
    arguments = ["--pure", "--keep-split", source, str(tmp_path / "out.gguf"), "Q8_0"]
    assert run(arguments) == 1
    err = capfd.readouterr().err
    assert f"MiB, 1024.000 GiB are free in {tmp_path / 'big'}\n" in err
    assert f"MiB more of disk space but only 0.001 MiB are free in {tmp_path / 'small'}\n" in err
    free["small"] = free["big"]
    assert run(arguments) == 0
    assert (tmp_path / "out-00003-of-00003.gguf").is_symlink()
    assert (tmp_path / "small" / "2.gguf").stat().st_size > 100_000


def test_a_recipe_does_not_take_the_name_of_the_output(tmp_path, capfd):
    """It was written first, and the output took its place."""
    source, output = write_model(tmp_path / "in.gguf"), str(tmp_path / "out.gguf")
    assert run(["--pure", "--save-recipe", output, source, output, "Q8_0"]) == 1
    assert f"--save-recipe {output}: this is the output" in capfd.readouterr().err


def test_interrupted_run_says_how_to_go_on(tmp_path, monkeypatch, capfd):
    source = write_model(tmp_path / "in.gguf")
    target = tmp_path / "out.gguf"
    real = ResumableOutput.pad
    calls = []

    def interrupt(self, index, position):
        real(self, index, position)
        calls.append(position)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ResumableOutput, "pad", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(["--pure", source, str(target), "Q8_0"])
    assert "interrupted; run the same command again to go on" in capfd.readouterr().err
    assert not target.exists()
    monkeypatch.setattr(ResumableOutput, "pad", real)
    assert run(["--pure", source, str(target), "Q8_0"]) == 0
    assert "going on with the unfinished" in capfd.readouterr().err
    assert leftovers(tmp_path) == []


def test_interrupted_run_without_data_leaves_nothing(tmp_path, monkeypatch, capfd):
    source = write_model(tmp_path / "in.gguf")

    def interrupt(self, index, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(ResumableOutput, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(["--pure", source, str(tmp_path / "out.gguf"), "Q8_0"])
    err = capfd.readouterr().err
    assert "interrupted before anything was written\n" in err and "go on" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


@pytest.mark.parametrize("nth", [1, 2])
def test_ctrl_c_between_the_renames_of_shards(tmp_path, monkeypatch, capfd, nth):
    """The renames are finished first: the old model was gone, and the new one without its first part."""
    source = write_model(tmp_path / "model", shards=2)
    line, rename, calls = ["--keep-split", source, str(tmp_path / "out")], os.replace, []

    def interrupt(path, target):
        rename(path, target)
        calls.append(target)
        if len(calls) == nth:
            raise KeyboardInterrupt

    def parts():
        return [path.read_bytes() for path in sorted(tmp_path.glob("out*"))]

    assert run([*line, "q4_0", "1"]) == 0
    new = parts()
    assert run([*line, "q8_0", "1"]) == 0
    assert len(new) == 2 and parts() != new
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupt)
        run([*line, "q4_0", "1"])
    assert parts() == new and leftovers(tmp_path) == []
    assert "is complete" in capfd.readouterr().err


@pytest.mark.parametrize("prefix", ("o" * 205, "模" * 70), ids=("ascii", "three bytes a character"))
def test_long_names_of_shards(tmp_path, prefix):
    """Temporary names are longer than a name may be: they are cut, and still one of each file's own."""
    source = write_model(tmp_path / "model", shards=2)
    for output in (tmp_path / "out", tmp_path / prefix):
        assert run(["--keep-split", source, str(output), "q8_0", "1"]) == 0
    shards = [f"-0000{i}-of-00002.gguf" for i in (1, 2)]
    names = {f"{prefix}{shard}" for shard in shards}
    assert names <= set(os.listdir(tmp_path)), os.listdir(tmp_path)
    assert leftovers(tmp_path) == []
    for shard in shards:
        assert (tmp_path / f"{prefix}{shard}").read_bytes() == (tmp_path / f"out{shard}").read_bytes(), shard


LITTLE_MEMORY = """
import re, resource, sys
import numpy as np
from ikpy._native import core
from ikpy.cli import main
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter

n = 1 << 22
with GGUFWriter("in.gguf") as writer:
    writer.add("general.architecture", GGUFValueType.STRING, "llama")
    writer.add("llama.block_count", GGUFValueType.UINT32, 1)
    writer.add_tensor("blk.0.ffn_up.weight", (n, 2), 0)
    writer.write("blk.0.ffn_up.weight", np.ones((2, n), np.float32))
real = core.quantize

def quantize(values, type_id, weights, n_threads):
    real(values[:, :65536], type_id, None, n_threads)  # threads and their memory are there
    size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), limits[1]))
    try:
        return real(values, type_id, weights, n_threads)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)

class Native:
    pass

patched = Native()
patched.__dict__ |= vars(core) | {"quantize": quantize}
from ikpy.tools import tensor_convert
tensor_convert._core = lambda: patched
sys.exit(main(["quantize", "--pure", "in.gguf", "out.gguf", "Q4_K", "2"]))
"""


def test_too_little_memory_in_an_encoder_is_one_line(tmp_path):
    """The encoder's threads need 16 MiB for the weights of a row; 8 are left."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "MALLOC_ARENA_MAX": "1",  # large blocks come from the system, not from what an arena has reserved
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY],
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if "not enough memory" in line]
    assert len(lines) == 1, done.stderr
    assert "not enough memory to encode tensor blk.0.ffn_up.weight as q4_k with 2 threads" in lines[0].lower()
    assert not (tmp_path / "out.gguf").exists()
