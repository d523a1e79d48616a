"""GGUF writer: what is read back, alignment, splits, and that an interrupted write changes nothing."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import ResourceError, UsageError
from ikpy.gguf import atomic
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType as T
from ikpy.gguf.writer import GGUFWriter

VALUES = {
    T.UINT8: 255,
    T.INT8: -128,
    T.UINT16: 65535,
    T.INT16: -32768,
    T.UINT32: 2**32 - 1,
    T.INT32: -(2**31),
    T.FLOAT32: 0.25,
    T.BOOL: True,
    T.STRING: "Grüße \udcff",
    T.UINT64: 2**64 - 1,
    T.INT64: -(2**63),
    T.FLOAT64: 0.1,
}


def _fill(writer: GGUFWriter, tensors: int = 5, seed: int = 0) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    writer.add("general.architecture", T.STRING, "llama")
    data = {f"t{i}": rng.bytes(34 * (i + 1)) for i in range(tensors)}
    for i, name in enumerate(data):
        writer.add_tensor(name, (32, i + 1), 8, len(data[name]))
    return data


def _write(path: Path, **limits) -> dict[str, bytes]:
    with GGUFWriter(path, **limits) as writer:
        data = _fill(writer)
        for name, content in data.items():
            for start in range(0, len(content), 10):
                writer.write(name, content[start : start + 10])
    return data


@pytest.mark.parametrize("alignment", [32, 1, 256])
def test_values_and_data_come_back(tmp_path, alignment):
    path = tmp_path / "out.gguf"
    with GGUFWriter(path, alignment=alignment) as writer:
        for value_type, value in VALUES.items():
            writer.add(value_type.label, value_type, value)
            writer.add_array(f"arr.{value_type.label}", value_type, [value, value])
        writer.add_array("numpy", T.FLOAT32, np.array([1, 2], np.float16))
        writer.add_array("empty", T.STRING, [])
        writer.add_tensor("a", (3,), 0)
        writer.add_tensor("b", (5, 2), 1)
        first, second = np.arange(3, dtype="<f4"), np.arange(10, dtype="<f2").reshape(2, 5)
        writer.write("a", first)
        writer.write("b", second)
    with GGUFFile.open(path) as file:
        assert file.version == 3 and file.alignment == alignment
        for value_type, value in VALUES.items():
            assert file.get(value_type.label) == value
            assert file.value_type(value_type.label) is value_type
            assert list(file.get(f"arr.{value_type.label}")) == [value, value]
            assert file.element_type(f"arr.{value_type.label}") is value_type
        assert file.get("numpy").tolist() == [1, 2]
        assert file.data(file.tensors["a"]).tobytes() == first.tobytes()
        assert file.data(file.tensors["b"]).tobytes() == second.tobytes()
        assert all(info.offset % alignment == 0 for info in file.tensors.values())
        assert file.file_size % alignment == 0
    assert os.listdir(tmp_path) == ["out.gguf"]


def test_the_gguf_package_reads_it(tmp_path):
    import gguf

    path = tmp_path / "out.gguf"
    data = _write(path)
    peer = gguf.GGUFReader(path)
    assert {t.name: t.data.tobytes() for t in peer.tensors} == data
    assert peer.fields["general.architecture"].contents() == "llama"


@pytest.mark.parametrize(
    ("value_type", "value"),
    [
        (T.UINT8, 256),
        (T.INT8, -129),
        (T.UINT32, -1),
        (T.UINT32, 1.5),
        (T.UINT32, True),
        (T.BOOL, 1),
        (T.FLOAT32, 1e39),
        (T.FLOAT32, "1"),
        (T.FLOAT32, 10**400),
        (T.FLOAT64, 10**400),
        (T.FLOAT64, np.complex64(1)),
        (T.STRING, 5),
        (T.ARRAY, [1]),
    ],
)
def test_values_that_do_not_fit_are_refused(tmp_path, value_type, value):
    with pytest.raises(UsageError):
        GGUFWriter(tmp_path / "x").add("k", value_type, value)
    with pytest.raises(UsageError):
        GGUFWriter(tmp_path / "x").add_array("k", value_type, [value])


@pytest.mark.parametrize("values", [np.array([1.5]), np.array([[1]], np.int32), np.array([1], np.int64)])
def test_numpy_arrays_are_not_narrowed(tmp_path, values):
    with pytest.raises(UsageError, match=r"does not fit type arr\[i32\]"):
        GGUFWriter(tmp_path / "x").add_array("k", T.INT32, values)


@pytest.mark.parametrize("name", ("m" * 240 + ".gguf", "模" * 78 + ".gguf"), ids=("ascii", "three bytes a character"))
def test_names_as_long_as_they_may_be(tmp_path, name):
    with atomic.replacing(tmp_path / name) as file:
        file.write(b"x")
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == [name]
    assert atomic.hidden_name(name, ".part") != atomic.hidden_name(name[:-1] + "g", ".part")
    assert atomic.hidden_name("model.gguf", ".part") == ".model.gguf.part"


def test_wrong_use_is_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "x.gguf")
    data = _fill(writer)
    with pytest.raises(ValueError, match="used twice"):
        writer.add("general.architecture", T.STRING, "x")
    with pytest.raises(ValueError, match="used twice"):
        writer.add_tensor("t0", (32,), 8)
    with pytest.raises(ValueError, match="takes 34 bytes, not 35"):
        writer.add_tensor("t9", (32,), 8, 35)
    with pytest.raises(ValueError, match="'t1' came when tensor 't0' was due"):
        writer.write("t1", data["t1"])
    with pytest.raises(ValueError, match="more than its 34 bytes"):
        writer.write("t0", bytes(35))
    with pytest.raises(ValueError, match="declared before"):
        writer.add("late", T.UINT8, 1)
    writer.write("t0", data["t0"])
    with pytest.raises(ValueError, match="'t1' is incomplete"):
        writer.close()
    assert os.listdir(tmp_path) == []
    with pytest.raises(UsageError, match="power of two"):
        GGUFWriter(tmp_path / "x", alignment=48)
    with pytest.raises(UsageError, match="alignment 33554432 is not a power of two up to 16777216"):
        GGUFWriter(tmp_path / "x", alignment=1 << 25)


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        ({"split_max_tensors": 2}, [2, 2, 1]),
        ({"split_max_bytes": 200}, [2, 1, 1, 1]),
        ({"split_max_tensors": 1, "split_max_bytes": 10}, [1] * 5),
        ({"split_max_tensors": 9}, [5]),
    ],
)
def test_splits(tmp_path, limits, counts):
    data = _write(tmp_path / "m.gguf", **limits)
    names = [f"m-{i + 1:05d}-of-{len(counts):05d}.gguf" for i in range(len(counts))]
    assert sorted(os.listdir(tmp_path)) == names
    with GGUFFile.open(tmp_path / names[0]) as file:
        assert [len(shard.header.tensors) for shard in file.shards] == counts
        assert {name: file.data(info).tobytes() for name, info in file.tensors.items()} == data
        for index, shard in enumerate(file.shards):
            assert shard.metadata.require("split.no", T.UINT16) == index
            assert shard.metadata.require("split.count", T.UINT16) == len(counts)
            assert shard.metadata.require("split.tensors.count", T.INT32) == 5


def test_split_keeps_an_unusual_alignment_in_every_shard(tmp_path):
    data = _write(tmp_path / "m", alignment=128, split_max_tensors=2)
    with GGUFFile.open(tmp_path / "m-00001-of-00003.gguf") as file:
        assert [shard.header.alignment for shard in file.shards] == [128] * 3
        assert {name: file.data(info).tobytes() for name, info in file.tensors.items()} == data


@pytest.mark.parametrize("limits", [{}, {"split_max_tensors": 2}])
@pytest.mark.parametrize("written", [0, 1, 3])
def test_an_exception_midway_leaves_the_old_files(tmp_path, limits, written):
    _write(tmp_path / "m.gguf", **limits)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with (
        pytest.raises(RuntimeError, match="interrupted"),
        GGUFWriter(tmp_path / "m.gguf", **limits) as writer,
    ):
        data = _fill(writer, seed=1)
        for name in list(data)[:written]:
            writer.write(name, data[name])
        writer.write(f"t{written}", b"part")
        raise RuntimeError("interrupted")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


_KILLED = """
import os, sys
from ikpy.gguf.writer import GGUFWriter
writer = GGUFWriter(sys.argv[1])
writer.add_tensor("a", (1000000,), 0)
writer.write("a", bytes(3000000))
os._exit(9)
"""


def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "m.gguf"
    _write(path)
    before = path.read_bytes()
    status = subprocess.run([sys.executable, "-c", _KILLED, str(path)], check=False).returncode
    assert status == 9
    assert path.read_bytes() == before
    leftovers = [name for name in os.listdir(tmp_path) if name != "m.gguf"]
    assert len(leftovers) == 1 and leftovers[0].startswith(".m.gguf.") and leftovers[0].endswith(".tmp")


def test_a_failing_rename_of_one_shard_never_mixes_old_and_new(tmp_path, monkeypatch):
    _write(tmp_path / "m.gguf", split_max_tensors=2)
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ResourceError, match="Input/output error"):
        _write(tmp_path / "m.gguf", split_max_tensors=2)
    assert sorted(os.listdir(tmp_path)) == ["m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]


def test_disk_space_is_checked_first(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf")
    writer.add_tensor("huge", (2**50,), 0)
    with pytest.raises(ResourceError, match=r"needs 4294967296\.0 MiB of disk space but only [\d.]+ MiB are free"):
        writer.write("huge", b"")
    assert os.listdir(tmp_path) == []


def test_missing_folders_are_made_and_impossible_ones_are_a_clear_error(tmp_path):
    target = tmp_path / "a" / "b" / "m.gguf"
    _write(target)
    assert target.is_file()
    with pytest.raises(ResourceError, match="cannot write: Not a directory"):
        _write(target / "c" / "m.gguf")


def test_small_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path, pipe = tmp_path / "a.txt", tmp_path / "pipe"
    atomic.write_whole(path, b"old")
    atomic.write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic.write_whole(pipe, b"text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_whole(path, b"newer")
    assert path.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "pipe"]


def test_links_and_permissions_are_kept(tmp_path):
    target, link = tmp_path / "real.gguf", tmp_path / "link.gguf"
    _write(target)
    target.chmod(0o600)
    link.symlink_to(target)
    target.write_bytes(b"old")
    _write(link)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    GGUFFile.open(target).close()


@pytest.mark.parametrize("place", ["fdopen", "__init__"])
def test_ctrl_c_while_a_file_is_begun_leaves_nothing(tmp_path, monkeypatch, place):
    """Between the file and what discards it."""

    def interrupted(*arguments, **_):
        if place == "__init__":
            begin(*arguments)
        raise KeyboardInterrupt

    begin = atomic.AtomicFile.__init__
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(*((atomic.os, place) if place == "fdopen" else (atomic.AtomicFile, place)), interrupted)
        atomic.write_whole(tmp_path / "a", b"x")
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_ctrl_c_between_the_renames_of_a_split_model(tmp_path, monkeypatch, nth, behind):
    """Neither is the old model gone without the new one nor are their parts mixed: the renames are finished."""
    path, rename, calls = tmp_path / "m.gguf", os.replace, []

    def write(seed):
        with GGUFWriter(path, split_max_tensors=2) as writer:
            for name, data in _fill(writer, seed=seed).items():
                writer.write(name, data)
        return [part.read_bytes() for part in sorted(tmp_path.iterdir())]

    def interrupted(source, target):
        calls.append(target)
        if behind:
            rename(source, target)
        if len(calls) == nth:
            raise KeyboardInterrupt
        if not behind:
            rename(source, target)

    new = write(2)
    assert write(1) != new and len(new) == 3
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(atomic.os, "replace", interrupted)
        write(2)
    assert [part.read_bytes() for part in sorted(tmp_path.iterdir())] == new


def test_little_room_is_told_in_kibibytes(tmp_path, monkeypatch):
    """`needs 0.0 MiB but only 0.0 MiB are free` said nothing."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("ikpy.gguf.disk_space.shutil.disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(ResourceError, match=r"needs 0\.\d KiB of disk space but only 0\.1 KiB are free"):
        _write(tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []
