"""What README.md says of commands and of speed is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import summary
from ikpy.cli import COMMANDS, gguf, named_command
from tests.shared import ROOT

README = (ROOT / "README.md").read_text()


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the first table behind a heading."""
    table = re.search(r"(?:^\|.*\n)+", text.partition(f"{heading}\n")[2], re.M)
    assert table is not None, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_every_command_is_in_the_table_of_commands() -> None:
    rows = table_rows(README, "## Commands")
    named = {command for _, here, *_ in rows for command in re.findall(r"`ikpy (\w[\w-]*)", here)}
    assert named == set(COMMANDS)
    for there, here, *_ in rows:
        for program in re.findall(r"`llama-(?:gguf-)?([\w-]+)`", there):
            assert program in re.findall(r"[\w-]+", here), there


def test_named_gguf_commands_exist() -> None:
    (here,) = (here for _, here, *_ in table_rows(README, "## Commands") if "ikpy gguf" in here)
    names = set(re.findall(r"`(?:ikpy gguf )?(\w+)`", here))
    assert names <= {command.name or command.callback.__name__ for command in gguf.app.registered_commands}


def test_the_links_it_makes_are_commands() -> None:
    loop = README.partition("for name in ")[2].partition("; do")[0].replace("\\\n", " ")
    programs, *scripts = loop.split()
    prefix, _, rest = programs.partition("{")
    names = [*(prefix + name for name in rest.rstrip("}").split(",")), *scripts]
    assert len(names) == 13
    assert all(named_command(f"/home/user/bin/{name}", []) for name in names)


@pytest.mark.parametrize("page", summary.PAGES, ids=lambda page: page.name)
def test_the_table_of_machines_is_that_of_the_reports(page: Path) -> None:
    assert summary.block(summary.PAGES[page]) in page.read_text()


def test_a_row_counts_only_what_was_measured_beside_a_peer() -> None:
    samples = {"pp": {"ikpy": [8.0], "ik": [2.0]}, "tg": {"ikpy": [6.0], "ik": [4.0]}}
    alone = {"pp": {"ikpy": [8.0]}, "tg": {"ikpy": [6.0]}}
    entries = [
        {"depth": 0, "samples": samples},
        {"depth": 4096, "samples": samples},
        {"depth": 0, "samples": samples, "prompt": 2048},
        {"depth": 0, "samples": alone},
    ]
    report = {"engines": ["ikpy", "ik"], "shapes": {"llama-1b": entries}, "types": {"q4_0": entries[0]}}
    assert summary.ratios([report], "shapes", "pp") == [4.0, 4.0]
    assert summary.ratios([report], "shapes", "tg") == [1.5]
    assert summary.ratios([report, {}], "types", "tg") == [1.5]
    assert summary.spread([1.0, 2.0, 4.0]) == "**2.0** (1.0 to 4.0)"
    assert summary.spread([1.71, 1.72]) == "**1.7**"
