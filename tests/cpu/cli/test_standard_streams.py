"""Full disks and slow readers behind standard output and standard error."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cpu.quantize.quantize_models import MODEL, small_tensors, write_model

IKPY = [sys.executable, "-m", "ikpy"]

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_work_goes_on_where_the_log_has_no_room(tmp_path: Path, unbuffered: str) -> None:
    write_model(tmp_path / "model.gguf", small_tensors())
    command = [*IKPY, "quantize", "model.gguf", "out.gguf", "Q8_0"]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, check=False, cwd=tmp_path, stdout=subprocess.PIPE, stderr=full, text=True, env=env, timeout=1200
        )
    assert result.returncode == 0
    assert (tmp_path / "out.gguf").exists()
    assert "total time" in result.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["gguf", "dump", str(MODEL)], ["quantize", "--help"], ["--version"]])
def test_results_that_have_no_room_are_an_error_that_names_them(arguments: list[str], unbuffered: str) -> None:
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*IKPY, *arguments], check=False, stdout=full, stderr=subprocess.PIPE, text=True, env=env, timeout=1200
        )
    assert result.returncode == 1
    assert result.stderr == "error: standard output: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_readers_of_pipes_that_do_not_block_may_be_slow(unbuffered: str) -> None:
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [*IKPY, "gguf", "dump", "--full", str(MODEL)]
    expected = subprocess.run(command, capture_output=True, check=True, timeout=1200).stdout
    assert len(expected) > 1 << 16  # more than a pipe holds
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=env) as program:
        os.close(writing)
        time.sleep(1)
        with open(reading, "rb") as pipe:
            assert pipe.read() == expected
        assert program.stderr is not None
        assert program.stderr.read() == b""
    assert program.returncode == 0
