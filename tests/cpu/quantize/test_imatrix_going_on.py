"""`ikpy imatrix` that was interrupted, killed or out of space, and goes on."""

from __future__ import annotations

import itertools
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ikpy.cli.imatrix import run
from ikpy.errors import ResourceError
from ikpy.tools import imatrix
from ikpy.tools.imatrix_file import read_file
from tests.cpu.quantize.imatrices import DEMO, MODEL, write_short_text
from tests.shared import ROOT


@pytest.fixture(scope="module")
def short_text(tmp_path_factory) -> str:
    return write_short_text(tmp_path_factory.mktemp("text"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ikpy", "imatrix", "-t", "2", *arguments]


def test_special_tokens_in_the_text(tmp_path, capfd):
    text = tmp_path / "text"
    text.write_text("<|user|>One.<|end|>" * 150)
    counts = []
    for more in ([], ["--parse-special"]):
        assert run(["-m", MODEL, "-f", str(text), "-c", "256", "-t", "2", "-o", str(tmp_path / "x"), *more]) == 0
        counts.append(int(re.search(r"computing over (\d+) chunks", capfd.readouterr().err)[1]))
    assert counts[0] > counts[1]


def test_interrupted_and_continued(tmp_path, capfd):
    """Ctrl-C keeps what was collected; going on with a GGUF file gives the sums of an undisturbed run."""
    part, rest, whole = (str(tmp_path / f"{name}.gguf") for name in ("part", "rest", "whole"))
    long_text = tmp_path / "long.txt"
    # Some 3000 chunks: at any speed far from done when the second one is printed.
    long_text.write_text(DEMO.read_text() * 10)
    process = subprocess.Popen(
        command("-f", str(long_text), "-o", part, "-c", "256"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - ignored in background jobs
    )  # fmt: skip
    seen = b""
    while b"[2]" not in seen:
        byte = process.stdout.read(1)
        assert byte, process.stderr.read().decode()
        seen += byte
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    message = re.search(rb"interrupted after (\d+) chunks; to go on: --in-file (\S+) --from-chunk (\d+)", err)
    assert message and message[2].decode() == part and message[1] == message[3], err[-400:]
    done = int(message[1])
    n = done + 2
    tail = ["-m", MODEL, "-f", str(long_text), "-c", "256", "-t", "2"]
    assert run([*tail, "--in-file", part, "--from-chunk", str(done), "--chunks", "2", "-o", rest]) == 0
    assert run([*tail, "--chunks", str(n), "-o", whole]) == 0
    capfd.readouterr()
    a, b = read_file(rest), read_file(whole)
    assert a.chunks == b.chunks == n
    for x, y in zip(a.records, b.records, strict=True):
        assert np.array_equal(x.rows, y.rows), x.name
        np.testing.assert_allclose(x.sums, y.sums, rtol=1e-5, err_msg=x.name)


@pytest.mark.parametrize(("call", "n_chunks"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_a_chunk_that_was_begun_is_not_counted_twice(short_text, tmp_path, capfd, monkeypatch, call, n_chunks):
    """Interrupted behind a call of two per chunk: what was collected of its chunk stays, the rest is left out."""
    after_call, output = imatrix.Run._after_call, tmp_path / "x.gguf"
    calls = itertools.count(1)

    def interrupted(self, n_tokens):
        after_call(self, n_tokens)
        if next(calls) == call:
            raise KeyboardInterrupt

    monkeypatch.setattr(imatrix.Run, "_after_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["-m", MODEL, "-f", str(DEMO), "-c", "256", "-ub", "128", "-t", "2", "-o", str(output)])
    end = f"interrupted after {n_chunks} chunks; to go on: --in-file {output} --from-chunk {n_chunks}"
    assert end in capfd.readouterr().err
    assert read_file(output).chunks == call


@pytest.mark.parametrize(("n_done", "hint"), [(3, ["--from-chunk", "3"]), (4, None)])
@pytest.mark.parametrize("chunks", [(), ("--chunks", "4")])
def test_the_last_chunk_can_be_gone_on_with(tmp_path, capfd, monkeypatch, n_done, hint, chunks):
    """Of four chunks; none of the text is left behind the last one. `--chunks` counts what is left."""
    text, report = tmp_path / "four.txt", imatrix.Run._print_ppl
    text.write_text(DEMO.read_text()[:4200])

    def interrupted(self):
        report(self)
        if self.n_done == n_done:
            raise KeyboardInterrupt

    line = ["-m", MODEL, "-f", str(text), "-c", "256", "-t", "2", *chunks]
    assert run([*line, "-o", str(tmp_path / "whole.gguf")]) == 0
    assert read_file(tmp_path / "whole.gguf").chunks == 4
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(imatrix.Run, "_print_ppl", interrupted)
        run([*line, "-o", str(tmp_path / "part.gguf")])
    err = capfd.readouterr().err
    if hint is None:
        assert "interrupted in the last of 4 chunks: nothing is left to go on with" in err
        return
    options = shlex.split(re.search(r"to go on: (.*)", err)[1])
    assert options == ["--in-file", f"{tmp_path}/part.gguf", *hint, *(("--chunks", "1") if chunks else ())]
    assert run([*line, *options, "-o", str(tmp_path / "rest.gguf")]) == 0
    for x, y in zip(read_file(tmp_path / "rest.gguf").records, read_file(tmp_path / "whole.gguf").records, strict=True):
        np.testing.assert_allclose(x.sums, y.sums, rtol=1e-5, err_msg=x.name)


def test_legacy_files_keep_what_going_on_needs(tmp_path, capfd, monkeypatch):
    """Interrupted with the default form: the file beside it goes on exactly, although `.dat` has no token counts."""
    chunk, output = imatrix.Run._chunk, tmp_path / "a b.dat"

    def interrupted(self, tokens):
        if self.n_done == 2:
            raise KeyboardInterrupt
        chunk(self, tokens)

    line = ["-m", MODEL, "-f", str(DEMO), "-c", "256", "-t", "2"]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(imatrix.Run, "_chunk", interrupted)
        run([*line, "-o", str(output)])
    err = capfd.readouterr().err
    hint = shlex.split(re.search(r"interrupted after 2 chunks; to go on: (.*)", err)[1])
    assert hint == ["--in-file", f"{output}.gguf", "--from-chunk", "2"] and output.exists()
    assert run([*line, *hint, "--chunks", "1", "-o", str(tmp_path / "rest.gguf")]) == 0
    assert run([*line, "--chunks", "3", "-o", str(tmp_path / "whole.gguf")]) == 0
    assert "one token of the new text" not in capfd.readouterr().err
    rest, whole = read_file(tmp_path / "rest.gguf"), read_file(tmp_path / "whole.gguf")
    for x, y in zip(rest.records, whole.records, strict=True):
        assert np.array_equal(x.rows, y.rows), x.name
        np.testing.assert_allclose(x.sums, y.sums, rtol=1e-5, err_msg=x.name)


@pytest.mark.parametrize("name", ["x.dat", "x.gguf"])
def test_ctrl_c_in_the_last_save_loses_nothing(short_text, tmp_path, capfd, monkeypatch, name):
    """All chunks are done; with `-ofreq 0` nothing of them was on the disk."""
    kinds, output = [], tmp_path / name

    def interrupted(self, *arguments):
        kinds.append(arguments)
        if len(kinds) == 1:
            raise KeyboardInterrupt
        save(self, *arguments)

    save = imatrix.Run.save
    monkeypatch.setattr(imatrix.Run, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["-m", MODEL, "-f", str(short_text), "-o", str(output), "-c", "256", "-t", "2", "-ofreq", "0"])
    assert "nothing is left to go on with" in capfd.readouterr().err
    assert len(read_file(output).records) > 10


def test_killed_while_saving_often(short_text, tmp_path):
    """A file that exists is always a whole one."""
    output = tmp_path / "x.dat"
    for delay in (0.3, 0.6, 0.9):
        process = subprocess.Popen(
            command("-f", str(DEMO), "-o", str(output), "-c", "256", "-ofreq", "1"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not output.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(delay)
        process.kill()
        process.wait()
        assert len(read_file(output).records) == 41


@pytest.mark.parametrize("full_from", [1, 2])
def test_a_disk_that_becomes_full(full_from, short_text, tmp_path, capfd, monkeypatch):
    """The first save tells; later ones leave the last good file alone, and the run goes on."""
    save, calls = imatrix.save, itertools.count(1)

    def full(*arguments, **keywords):
        if full_from <= next(calls) < full_from + 2:
            raise ResourceError("cannot write it: No space left on device")
        return save(*arguments, **keywords)

    monkeypatch.setattr(imatrix, "save", full)
    output = tmp_path / "x.gguf"
    line = ["-m", MODEL, "-f", short_text, "-c", "256", "-t", "2", "-ofreq", "1", "-o", str(output), "--chunks"]
    if full_from == 1:
        with pytest.raises(ResourceError, match="No space left on device"):
            run([*line, "4"])
        return
    assert run([*line, "4"]) == 0
    err = capfd.readouterr().err
    assert (
        err.count(f"warning: cannot write it: No space left on device; going on, {output} holds the data of 1 calls")
        == 2
    )
    assert "stored collected data after 4 chunks" in err and read_file(output).chunks == 4
    calls = itertools.count(1)
    with pytest.raises(ResourceError, match=r"No space left on device; .* holds the data of 1 calls"):
        run([*line, "2"])
