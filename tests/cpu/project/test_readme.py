"""What README.md says of commands and of speed is what there is."""

from __future__ import annotations

import re

from ikpy.cli import COMMANDS, gguf, named_command
from tests.shared import ROOT

README = (ROOT / "README.md").read_text()
REPORT = (ROOT / "docs" / "performance.md").read_text()


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the first table behind a heading."""
    table = re.search(r"(?:^\|.*\n)+", text.partition(f"{heading}\n")[2], re.M)
    assert table is not None, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_every_command_is_in_the_table_of_commands() -> None:
    rows = table_rows(README, "## Commands")
    named = {command for _, here, _ in rows for command in re.findall(r"`ikpy (\w[\w-]*)", here)}
    assert named == set(COMMANDS)
    for there, here, _ in rows:
        for program in re.findall(r"`llama-(?:gguf-)?([\w-]+)`", there):
            assert program in re.findall(r"[\w-]+", here), there


def test_named_gguf_commands_exist() -> None:
    (here,) = (here for _, here, _ in table_rows(README, "## Commands") if "ikpy gguf" in here)
    names = set(re.findall(r"`(?:ikpy gguf )?(\w+)`", here))
    assert names <= {command.name or command.callback.__name__ for command in gguf.app.registered_commands}


def test_the_links_it_makes_are_commands() -> None:
    loop = README.partition("for name in ")[2].partition("; do")[0].replace("\\\n", " ")
    programs, *scripts = loop.split()
    prefix, _, rest = programs.partition("{")
    names = [*(prefix + name for name in rest.rstrip("}").split(",")), *scripts]
    assert len(names) == 13
    assert all(named_command(f"/home/user/bin/{name}", []) for name in names)


def ratios(heading: str, test: str) -> tuple[float, float]:
    """Smallest and largest `ikpy / best peer` of the report's rows of a kind of test."""
    values = [float(row[4]) for row in table_rows(REPORT, heading) if row[1].startswith(test) and row[4] != "-"]
    return min(values), max(values)


def test_stated_ratios_are_those_of_the_report() -> None:
    text = " ".join(README.partition("## How fast")[2].split())
    types, shapes = "### Weight types (shape of Llama 3.2 1B)", "### Model shapes"
    for heading, sentence in (
        (types, r"prompts are ([\d.]+) to ([\d.]+) times and single tokens ([\d.]+) to ([\d.]+) times"),
        (shapes, r"whole model shapes are ([\d.]+) to ([\d.]+) times and tokens ([\d.]+) to ([\d.]+) times"),
    ):
        stated = re.search(sentence, text)
        assert stated is not None, sentence
        assert [float(value) for value in stated.groups()] == [
            round(value, 1) for test in ("pp", "tg") for value in ratios(heading, test)
        ], heading
    n_types = sum(row[1].startswith("pp") and row[4] != "-" for row in table_rows(REPORT, types))
    assert f"for {n_types} weight types" in text
