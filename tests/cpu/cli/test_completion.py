"""Completion in bash: what the printed script offers."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ikpy.cli import COMMANDS, main
from ikpy.cli.completion import bash_script

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="there is no bash")
ASK = '\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ikpy; printf "%s\\n" "${COMPREPLY[@]}"'


def offered(*words: str) -> list[str]:
    """What bash completes the last word to."""
    line = [str(BASH), "-c", bash_script() + ASK, "bash", *words]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ikpy", "ser"], ["server"]),
        (["ikpy", "--vers"], ["--version"]),
        (["/usr/bin/ikpy", "server", "-m", "a b.gguf", "--cache-reu"], ["--cache-reuse"]),
        (["ikpy", "gguf", "me"], ["merge"]),
        (["ikpy", "gguf", "split", "x.gguf", "--no-t"], ["--no-tensor-first-split"]),
        (["ikpy", "cuda", "build", "--ar"], ["--arch"]),
        (["llama-quantize", "--pru"], ["--prune-layers"]),
        (["bin/llama-gguf-split", "--split-max-s"], ["--split-max-size"]),
        (["llama-completion", "--single-t"], ["--single-turn"]),
        (["gguf-py/scripts/gguf_dump.py", "--no-t"], ["--no-tensors"]),
        (["convert_hf_to_gguf.py", "--outt"], ["--outtype"]),
        (["ikpy", "bench", "--n-gen"], ["--n-gen"]),
        (["ikpy", "convert", "--outt"], ["--outtype"]),
        (["ikpy", "tokenize", "--show"], ["--show-count"]),
        (["ikpy", "quantize", "mod"], []),
        (["ikpy", "server", "--aud"], []),
        (["llama-mtmd-cli", "--image-mi"], ["--image-min-tokens"]),
    ],
)
def test_what_is_offered(words: list[str], found: list[str]) -> None:
    assert offered(*words) == found


def test_all_commands_are_offered() -> None:
    assert offered("ikpy", "") == list(COMMANDS)


@pytest.mark.parametrize("line", [["--completion-bash"], ["server", "--completion-bash"]])
def test_the_script_is_printed(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 0
    assert capsys.readouterr().out == bash_script()
