"""Damaged files of every kind on the command line: status 0, or one clear line and status 1."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from random import Random

import pytest

from ikpy.cli import main
from ikpy.errors import printable
from tests.cpu.gguf.damaged_files import TARGETS, Originals, problem

CASES = 12
"""Of every kind; `python -m tests.cpu.gguf.damaged_files` runs as many as one likes, each in a process of its own."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("originals"))


@pytest.mark.parametrize("target", TARGETS)
def test_damage_ends_in_one_clear_line(
    target: str, files: Originals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses = []
    for seed in range(CASES):
        arguments = TARGETS[target](Random(f"{target} {seed}"), files, tmp_path)
        capfd.readouterr()
        statuses.append(main(arguments))
        found = problem(statuses[-1], capfd.readouterr().err)
        assert found is None, f"{target}, seed {seed}: {found} ({' '.join(arguments)})"
    assert 1 in statuses


DIGITS = "1" * 5000
DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(("option", "content", "message"), [
    ("--config", f"n = {DEEP}", "maximum recursion depth|nested more than"),
    ("--config", f"ctx-size = {DIGITS}", "5000 digits|ctx-size is too large"),
    ("--config", f"ctx-size = 0x{DIGITS}", "ctx-size is too large"),
    ("-jf", DEEP, "JSON schema is (not valid JSON: maximum recursion depth|nested too deeply)|unsupported schema"),
    ("-jf", f'{{"maximum": {DIGITS}}}', "JSON schema is not valid JSON|maximum must be a number"),
    ("-jf", f'{{"maximum": {DIGITS[:400]}}}', "maximum must be a number"),
    ("--chat-template-file", f"{{{{ {DIGITS} }}}}", "chat template: |message is too long"),
    ("--chat-template-kwargs", f'{{"a": {DEEP}}}', "not JSON: maximum recursion depth"),
])  # fmt: skip
def test_numbers_and_nesting_without_bound(
    option: str, content: str, message: str, files: Originals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is too much for a parser depends on the version of Python: only some give up by themselves."""
    path = tmp_path / "file"
    path.write_text(content)
    value = content if option == "--chat-template-kwargs" else str(path)
    arguments = [*files.generate(files.model)[:-2], "-cnv", "-st", option, value]
    status, error = main(arguments), capfd.readouterr().err
    assert problem(status, error) is None, (status, problem(status, error))
    if status == 0 and option == "--chat-template-kwargs" and sys.version_info >= (3, 12):
        return  # json reads this depth
    line = next(line for line in error.split("\n") if line.startswith("error: "))
    assert status == 1 and re.search(message, line), line[:300]


@pytest.mark.parametrize(("text", "shown"), [
    ("tensor 'a\x1b[31m\x00\x9b' is\ndamaged", "tensor 'a\\x1b[31m\\x00\\x9b' is damaged"),
    ("Größe ~ €", "Größe ~ €"),
])  # fmt: skip
def test_names_in_errors_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
