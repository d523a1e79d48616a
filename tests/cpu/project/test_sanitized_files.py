"""The tests that scripts/test_sanitized runs: its list follows the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.shared import ROOT

# Tests of kernels that run other processes, on tiers of their own choice.
OWN_PROCESSES = {"test_tiers.py", "test_tile_units.py"}


def listed_files() -> list[Path]:
    """Files of both kinds; patterns that nothing matches stay as they are."""
    script = (ROOT / "scripts" / "test_sanitized").read_text()
    lists = re.findall(r"^ *files\+?=\((.*?)\)$", script, re.DOTALL | re.MULTILINE)
    assert len(lists) == 2
    command = f"printf '%s\\n' {' '.join(' '.join(lists).split())}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True, text=True)
    return [ROOT / line for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_listed_files_are_there_once_and_those_of_kernels_are_listed() -> None:
    files = listed_files()
    assert [file for file in files if not file.is_file()] == []
    assert sorted(files) == sorted(set(files))
    kernels = {file.name for file in (ROOT / "tests" / "cpu" / "kernels").glob("test_*.py")}
    assert kernels - {file.name for file in files} == OWN_PROCESSES
