"""Unfinished outputs of `ikpy quantize`: damaged journals, those of another job, and two runs at once."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli.quantize import run
from ikpy.errors import UsageError
from ikpy.file_locks import lock_file
from ikpy.gguf.writer import GGUFWriter
from ikpy.tools import quantize_job, resumable
from ikpy.tools.resumable import ResumableOutput
from tests.cpu.quantize.interrupted_runs import leftovers, stopped_run, write_model


def test_two_runs_for_one_output(tmp_path):
    writer = GGUFWriter(tmp_path / "out.gguf")
    writer.add_tensor("a", (32,), 0)
    layouts = writer.plan()
    first = ResumableOutput(layouts, "job")
    first.open()
    with pytest.raises(UsageError, match="another process is writing this file"):
        ResumableOutput(layouts, "job").open()
    first.discard()
    assert leftovers(tmp_path) == []


def test_file_systems_without_locks(tmp_path, monkeypatch):
    """Lustre and NFS as some mount them; other errors of locks are errors."""
    for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO):

        def refuse(*_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)
        path = tmp_path / f"{number}.lock"
        with path.open("w") as file:
            if number == errno.EIO:
                with pytest.raises(OSError, match="Input/output error"):
                    lock_file(file.fileno(), fcntl.LOCK_EX)
            else:
                lock_file(file.fileno(), fcntl.LOCK_EX)


@pytest.mark.parametrize("damage", ["torn", "short", "foreign", "binary"])
def test_damaged_journals(tmp_path, damage):
    """Whatever a journal says, the file written after it is right."""
    writer = GGUFWriter(tmp_path / "out.gguf")
    writer.add_tensor("a", (4096,), 0)
    (layout,) = writer.plan()
    content = np.arange(4096, dtype=np.float32).tobytes()
    output = ResumableOutput([layout], "job")
    output.open()
    output.write(0, content[:4096])
    output.keep()
    journal, part = tmp_path / ".out.gguf.journal", tmp_path / ".out.gguf.part"
    if damage == "torn":
        journal.write_bytes(journal.read_bytes() + b'{"file": 0, "posi')
    elif damage == "short":
        os.truncate(part, 50)
    elif damage == "foreign":
        journal.write_bytes(journal.read_bytes().replace(b'"job": "job"', b'"job": "x"'))
    else:
        journal.write_bytes(bytes(range(256)))
    output = ResumableOutput([layout], "job")
    assert output.open() == (damage == "torn")
    (place,) = resumable.tensor_places(layout, 32)
    done = output.resumed_bytes(0, place, len(content))
    assert done == (4096 if damage == "torn" else 0)
    output.write(0, content[done:])
    output.publish()
    assert (tmp_path / "out.gguf").read_bytes() == layout.header + content
    assert leftovers(tmp_path) == []


def test_killed_between_the_last_byte_and_the_name(tmp_path):
    """A journal that says complete: the next run only renames."""
    writer = GGUFWriter(tmp_path / "out.gguf")
    writer.add_tensor("a", (32,), 0)
    (layout,) = writer.plan()
    output = ResumableOutput([layout], "job")
    output.open()
    output.write(0, bytes(128))
    output._check_complete()
    output._record({"complete": True})
    output._close()
    again = ResumableOutput([layout], "job")
    assert again.open()
    assert again.n_done_bytes == layout.nbytes, "no more room is needed"
    assert again.resumed_bytes(0, len(layout.header), 128) == 128
    again.publish()
    assert (tmp_path / "out.gguf").stat().st_size == layout.nbytes


def write_imatrix(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    entries = [(f"blk.{i}.ffn_up.weight", rng.uniform(1, 2, 256).astype("<f4")) for i in range(6)]
    content = np.array([len(entries)], "<i4").tobytes()
    for name, values in entries:
        content += np.array([len(name)], "<i4").tobytes() + name.encode()
        content += np.array([1, len(values)], "<i4").tobytes() + values.tobytes()
    path.write_bytes(content)


@pytest.mark.parametrize("change", ["nothing", "imatrix", "source", "rule", "encoder"])
def test_whatever_the_bytes_depend_on_starts_over(change, tmp_path, monkeypatch, capfd):
    """Names, sizes and times of the files stay as they were."""
    source, target, imatrix = tmp_path / "in.gguf", tmp_path / "out.gguf", tmp_path / "imatrix.dat"
    write_model(source)
    write_imatrix(imatrix, seed=1)
    before = source.stat()
    options = ["--imatrix", str(imatrix)]
    stopped_run(str(source), target, options, monkeypatch)
    if change == "imatrix":
        write_imatrix(imatrix, seed=2)
    elif change == "source":
        content = source.read_bytes()
        source.write_bytes(content[:-1000] + bytes(1000))
        with source.open("r+b") as file:
            file.seek(len(content) - 192 * 256 * 4)  # the last tensor, which the first run did not reach
            file.write(np.float32(7).tobytes())
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "rule":
        options += ["--custom-q", r"blk\.0\.ffn_up=q5_K"]
    elif change == "encoder":
        monkeypatch.setattr(quantize_job, "encoder_digest", lambda: "another build")
    capfd.readouterr()
    assert run([*options, str(source), str(target), "Q4_K"]) == 0
    assert ("going on with the unfinished" in capfd.readouterr().err) == (change == "nothing")
    assert run([*options, str(source), str(tmp_path / "whole.gguf"), "Q4_K"]) == 0
    assert target.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_encoder_digest_covers_the_native_module(monkeypatch, tmp_path):
    """A build from other sources is another encoder, though the version is the same."""
    from ikpy._native import core

    own = quantize_job.encoder_digest()
    copy = tmp_path / Path(core.__file__).name
    copy.write_bytes(Path(core.__file__).read_bytes() + b"\0")
    monkeypatch.setattr(core, "__file__", str(copy))
    assert quantize_job.encoder_digest.__wrapped__() != own
