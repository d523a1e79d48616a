"""Damaged files of every kind on the command line: status 0, or one clear line and status 1."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from ikpy.cli import main
from ikpy.errors import printable
from tests.cpu.damaged_files import TARGETS, Originals, problem

CASES = 12
"""Of every kind; `python -m tests.cpu.damaged_files` runs as many as one likes, each in a process of its own."""


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


@pytest.mark.parametrize(("text", "shown"), [
    ("tensor 'a\x1b[31m\x00\x9b' is\ndamaged", "tensor 'a\\x1b[31m\\x00\\x9b' is damaged"),
    ("Größe ~ €", "Größe ~ €"),
])  # fmt: skip
def test_names_in_errors_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
