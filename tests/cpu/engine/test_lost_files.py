"""Files that vanish under their mapping: a line and status 1, in every command, and no handler of others replaced."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ikpy
from tests.shared import ROOT

# Shortens the model once its header is read.
SHORTENED = """
import os, sys
from ikpy.cli import main
from ikpy.gguf.reader import GGUFFile

opened = GGUFFile.open.__func__

def open_and_shorten(cls, path, *arguments, **options):
    file = opened(cls, path, *arguments, **options)
    if not options.get("header_only"):
        os.truncate(sys.argv[1], 400_000)
    return file

GGUFFile.open = classmethod(open_and_shorten)
sys.exit(main(sys.argv[2:]))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        "cli -p Hello -n 2 -t 1 -m MODEL",
        "bench -p 8 -n 0 -r 1 -t 2 -m MODEL",
        "quantize MODEL OUT q8_0 1",
        "gguf hash MODEL",
    ],
)
def test_a_model_that_is_shortened(arguments: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(ikpy.default_model_path(), model)
    words = [{"MODEL": str(model), "OUT": str(tmp_path / "out.gguf")}.get(word, word) for word in arguments.split()]
    result = run(SHORTENED, str(model), *words)
    assert result.returncode == 1, result.stderr[-300:]
    assert result.stderr.endswith("or its disk or network drive failed\n") and result.stderr.count("error:") == 1


def test_other_bus_errors_and_handlers_stay() -> None:
    code = "{}; from ikpy._native.faults import name_bus_errors; name_bus_errors(b'gone\\n'); {}"
    raised = "import os; os.kill(os.getpid(), 7)"
    assert run(code.format("pass", raised)).returncode == -signal.SIGBUS
    result = run(code.format("import faulthandler; faulthandler.enable()", raised))
    assert result.returncode == -signal.SIGBUS and "Fatal Python error: Bus error" in result.stderr
