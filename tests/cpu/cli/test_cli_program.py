"""The program ikpy as users start it: errors, interruptions, versions, help, what a start imports."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import ikpy.cli
from ikpy.cli import COMMANDS, main
from tests.shared import ROOT


def ikpy_program(*arguments: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ikpy", *arguments], capture_output=True, text=True, check=False, cwd=ROOT, **more
    )


def test_devices_are_listed():
    result = ikpy_program("server", "--list-devices", env={**os.environ, "IKPY_CUDA_EMULATE": "2"})
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["Available devices", "  CUDA0", "  CUDA1"]


def test_an_interrupt_while_a_class_is_made_is_one(monkeypatch, capsys):
    """Older interpreters put a RuntimeError around what __set_name__ raises."""

    def wrapped(arguments):
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("ikpy.cli.info.run", wrapped)
    assert ikpy.cli.main(["info"]) == 130
    assert capsys.readouterr().err == "\n"


def test_errors_of_the_program_are_one_line():
    result = ikpy_program("sweep-bench", "--qqq-this")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[0] == "error: unknown argument: --qqq-this"
    assert "Traceback" not in result.stderr
    assert "Traceback" in ikpy_program("--verbose", "sweep-bench", "--nope").stderr
    result = ikpy_program("swep-bench")
    assert (result.returncode, result.stderr) == (1, "error: no such command: swep-bench (did you mean sweep-bench?)\n")


LOST_INTERRUPT = """
import signal, sys
import ikpy.cli
from ikpy.cli import COMMANDS, main
from ikpy.tools import bench

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Lost:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

measured = bench.Runner.run

def run(self, test):
    Lost()
    return measured(self, test)

bench.Runner.run = run
sys.exit(ikpy.cli.main(["bench", "-p", "0", "-n", "1", "-r", "1000000"]))
"""


def test_an_interrupt_that_python_ignores_comes_again():
    result = subprocess.run(
        [sys.executable, "-c", LOST_INTERRUPT], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    assert result.returncode == 130
    assert "Exception ignored" not in result.stderr


def test_interruption_and_broken_programs(monkeypatch, capfd):
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    def broken(_: list[str]) -> int:
        raise RuntimeError("two\nlines")

    for run_command, status in ((interrupted, 130), (broken, 1)):
        monkeypatch.setattr(ikpy.cli, "import_module", lambda _, run=run_command: SimpleNamespace(run=run))
        assert ikpy.cli.main(["info"]) == status
    assert capfd.readouterr().err.splitlines()[-2] == "error: internal error: RuntimeError: two lines"


def test_info():
    lines = ikpy_program("info").stdout.splitlines()
    names = [line[:16].strip() for line in lines[:-1]]
    assert names[:3] == ["ikpy", "python", "platform"]
    assert {"native core", "compiler", "openmp", "build flags", "threads", "memory"} <= set(names)
    assert lines[-1].startswith("system_info: n_threads = ")
    assert ikpy_program("info", "x").returncode == 1


def test_closed_pipe_is_quiet():
    line = f"{sys.executable} -m ikpy sweep-bench --help | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (result.stdout, result.stderr) == ("usage: ikpy sweep-bench [options]\n141\n", "")


def test_a_plan_is_no_log():
    result = ikpy_program("perplexity", "--dry-run", "-c", "64", "-t", "1", "--log-disable")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.splitlines()[-1].startswith("Memory required for model tensors + cache: ")


def test_text_of_perplexity():
    result = ikpy_program("perplexity", "--chunks", "1", "-c", "64", "--log-disable")
    assert result.returncode == 0
    assert result.stdout.startswith("[1]")
    assert all(line.startswith("no ") and ": using the bundled " in line for line in result.stderr.splitlines())
    assert "no text given with -f: using the bundled demo text" in result.stderr
    for arguments in (("-m", "model.gguf"), ("-p", ""), ("--hellaswag",)):
        result = ikpy_program("perplexity", "--log-disable", *arguments)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == "error: there is no text to evaluate: give a file with -f\n"


def test_too_large_a_context_is_one_line():
    """Memory beyond the machine may be given by the system, which ends the process once it is used."""
    result = ikpy_program("perplexity", "--chunks", "1", "-c", "2000000000", "--log-disable")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: not enough memory (a KV cache for ")
    assert "Traceback" not in result.stderr


def test_small_mistakes_are_one_line(tmp_path):
    """Threads beyond counting, a temperature that is no number, an empty text, an unknown subcommand of cuda."""
    model, out = str(ikpy.default_model_path()), str(tmp_path / "out.gguf")
    empty = tmp_path / "empty.txt"
    empty.touch()
    for arguments, message in (
        (["quantize", model, out, "Q4_0", "99999999999"], "main: invalid nthread '99999999999' (at most 1024)"),
        (["cli", "-p", "x", "--temp", "nan"], "error: temperature must be a number, not nan"),
        (["imatrix", "-f", str(empty)], "error: the text is empty: give one with -f FILE"),
        (["cuda", "nope"], "error: unknown argument: nope (ikpy cuda info, build, tune and check exist)"),
    ):
        result = ikpy_program(*arguments)
        assert result.returncode == 1
        assert message in result.stderr.splitlines(), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


@pytest.mark.parametrize("command", [*COMMANDS, "gguf split", "gguf hash"])
def test_version_of_every_command(command, capfd):
    assert main([*command.split(), "--version"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split()[0] for line in err.splitlines()] == ["version:", "built"]


def test_version_of_a_name_of_the_reference(capfd, monkeypatch):
    for name in ("quantize", "bench", "tokenize", "gguf-split", "gguf-hash"):
        monkeypatch.setattr("sys.argv", [f"/usr/bin/llama-{name}", "--version"])
        assert main() == 0
        assert capfd.readouterr().err.startswith("version: ")


def test_a_text_may_be_the_name_of_an_option(capfd):
    assert main(["tokenize", "--log-disable", "-p", "--version"]) == 0
    assert "'vers'\n" in capfd.readouterr().out


def test_version_and_help():
    result = ikpy_program("sweep-bench", "--version")
    assert result.returncode == 0
    assert result.stderr.splitlines()[0].startswith("version: ")
    assert result.stderr.splitlines()[1].startswith("built with ")
    result = ikpy_program("--help")
    assert ikpy_program("-h").stdout == result.stdout
    assert result.returncode == 0
    for name in ("bench", "sweep-bench", "tokenize", "info"):
        assert f"\n  {name} " in result.stdout
    result = ikpy_program("sweep-bench", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "-c, --ctx-size N" in result.stdout


@pytest.mark.parametrize(
    "command", [[name] for name in COMMANDS] + [["gguf", "dump"], ["cuda", "build"], ["cuda", "check"]]
)
def test_every_command_helps(command, capsys):
    texts = []
    for name in ("-h", "--help"):
        assert main([*command, name]) == 0, (command, name)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "usage: ikpy" in texts[0].lower()


def test_start_imports_nothing_heavy():
    code = "import sys, ikpy.cli; ikpy.cli.make_app(); print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(result.stdout.split())
    heavy = {"numpy", "rich", "tokenizers", "jinja2", "psutil", "gguf", "regex", "ikpy.engine", "ikpy.cli.options"}
    assert not loaded & heavy


@pytest.mark.parametrize(("tool", "unused"), [("cli", {"httpx", "uvicorn", "starlette"}), ("server", {"httpx"})])
def test_tools_start_without_what_others_use(tool: str, unused: set[str]) -> None:
    """pydantic among it, which Typer loads for options of its own."""
    code = f"import sys; from ikpy.cli import main; print(main([{tool!r}, '-m', 'nofile'])); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    status, loaded = result.stdout.splitlines()[-2:]
    assert status == "1" and "ikpy.cli.parser" in loaded.split()
    assert not set(loaded.split()) & {"pydantic", *unused}
