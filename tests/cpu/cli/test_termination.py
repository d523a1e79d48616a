"""SIGTERM and SIGHUP during long work, and ikpy under the names of the programs that it replaces."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ikpy
from ikpy.cli import main, named_command
from ikpy.signals.termination import as_interruptions
from tests.shared import ROOT

MODEL, TEXT = str(ikpy.default_model_path()), str(Path(ikpy.__file__).parent / "assets" / "demo-text.txt")
LINES = ["-m", MODEL, "-f", TEXT, "-t", "1", "-c", "64", "-b", "64"]


def ended(arguments: list[str], ready: Callable[[], bool], number: signal.Signals) -> tuple[int, str]:
    """Exit status and log of ikpy, to which a signal is sent once it is ready."""
    before = signal.signal(number, signal.SIG_DFL)  # tests under nohup would hand on that SIGHUP is ignored
    try:
        process = subprocess.Popen([sys.executable, "-m", "ikpy", *arguments], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(number, before)
    assert process.stderr is not None
    end = time.monotonic() + 60
    while not ready() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(number)
    log = process.communicate(timeout=60)[1]
    return process.returncode, log


def test_an_importance_matrix_is_saved(tmp_path: Path) -> None:
    target = tmp_path / "imatrix.dat"
    arguments = ["imatrix", *LINES, "-o", str(target), "-ofreq", "1"]
    status, log = ended(arguments, target.exists, signal.SIGTERM)
    assert status == 143, log[-500:]
    assert "Traceback" not in log and log.count("\n\n") >= 1
    assert target.stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    arguments = ["perplexity", *LINES, "--kl-divergence-base", str(tmp_path / "base.bin")]
    status, log = ended(arguments, lambda: any(tmp_path.iterdir()), signal.SIGHUP)
    assert status == 129, log[-500:]
    assert "Traceback" not in log
    assert list(tmp_path.iterdir()) == []


def test_signals_that_are_ignored_stay_ignored() -> None:
    """As SIGHUP under nohup; the others are put back."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with as_interruptions() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.status is None
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signals.status == 143
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_status_is_that_of_the_signal_wherever_it_arrives(tmp_path: Path) -> None:
    """After one in the middle of what dataclasses are made by, python -m ended as if by Ctrl-C."""
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from types import SimpleNamespace\n"
        "import ikpy.cli\n"
        "def run(_):\n"
        "    exec('import signal; signal.raise_signal(signal.SIGTERM)')\n"
        "ikpy.cli.import_module = lambda _: SimpleNamespace(run=run)\n"
        "sys.exit(ikpy.cli.main(['gguf']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = subprocess.run([sys.executable, "-m", "program"], env=environment, check=False, timeout=60)
    assert result.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("module", ["typer", "ikpy.errors"])
def test_ctrl_c_while_the_program_starts(module: str) -> None:
    """The installed program imports much before it handles anything: that ended in a traceback."""
    entry = re.search(r'^ikpy = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert entry is not None
    program = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"from {entry[1]} import {entry[2]}\n"
        f"sys.exit({entry[2]}())\n"
    )
    line, environment = [sys.executable, "-c", program, "info"], {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(line, env=environment, check=False, timeout=60, capture_output=True, text=True)
    assert (result.returncode, result.stderr.strip()) == (130, "")


def test_other_threads_set_no_signals() -> None:
    found: list[object] = []

    def look() -> None:
        with as_interruptions():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


# names


@pytest.mark.parametrize(
    ("program", "arguments", "command"),
    [
        ("/usr/bin/llama-quantize", [], ["quantize"]),
        ("llama-sweep-bench", [], ["sweep-bench"]),
        ("llama-completion", ["-p", "a"], ["cli"]),
        ("llama-gguf-split", ["--split", "a", "b"], ["gguf", "split"]),
        ("llama-gguf-split", ["--merge", "a", "b"], ["gguf", "merge"]),
        ("llama-gguf-hash", ["a"], ["gguf", "hash"]),
        ("gguf-py/scripts/gguf_dump.py", ["--no-tensors", "a"], ["gguf", "dump"]),
        ("gguf-dump", ["a"], ["gguf", "dump"]),
        ("gguf_set_metadata.py", ["a", "general.name", "b"], ["gguf", "set"]),
        ("./convert_hf_to_gguf.py", ["--outtype", "bf16", "folder"], ["convert"]),
        ("dump", [], []),
        ("ikpy", ["quantize"], []),
        ("llama-unknown", [], []),
        ("__main__.py", [], []),
    ],
)
def test_commands_of_names(program: str, arguments: list[str], command: list[str]) -> None:
    assert named_command(program, arguments) == command


def test_a_link(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/user/bin/llama-tokenize", "-m", MODEL, "-p", "hello", "--ids"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("[")
