"""Citations of the documentation in comments and docstrings lead to something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.cpu.cli.test_command_lines import anchors
from tests.shared import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
CODE = (".py", ".pyx", ".pxd", ".hpp", ".cpp", ".cuh", ".cu")
FOLDERS = ("ikpy", "tests", "benchmarks", "scripts")
# Names of documents that only their authors have.
UNKNOWN_DOCUMENTS = re.compile(
    r"(quant.formats|tools|model semantics|specification)[,.]?( sections?)? \d+(\.\d+)*\b|tools specification|§",
    re.IGNORECASE,
)


def source_files() -> Iterator[Path]:
    """Source files that belong to the repository."""
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in CODE and path != Path(__file__))


def test_citations_in_the_code_lead_somewhere():
    broken = []
    for path in source_files():
        for name, anchor in re.findall(r"(?<![\w/])(?:docs/)?([\w-]+\.md)(?:#([\w-]+))?", path.read_text()):
            page = next((each for each in PAGES if each.name == name), None)
            if anchor and (page is None or anchor not in anchors(page)):
                broken.append(f"{path.relative_to(ROOT)}: {name}#{anchor}")
    assert not broken


def test_no_document_is_cited_that_is_not_here():
    cited = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in source_files()
        if (match := UNKNOWN_DOCUMENTS.search(path.read_text()))
    ]
    assert not cited


def test_files_that_are_named_are_there():
    """Paths of tests, of native kernels and of the device's kernels; a * stands for any part of a name."""
    named = re.compile(
        r"(?<![\w/*])(?:ikpy/_native/)?((?:tests|kernels|benchmarks|scripts)/[\w/*]*[\w*]\.(?:py|pyx|[ch]pp|cuh?))\b"
    )
    places = (ROOT, ROOT / "ikpy" / "_native", ROOT / "ikpy" / "backends" / "cuda")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*PAGES, *source_files())
        for name in named.findall(path.read_text())
        if not any(next(place.glob(name), None) for place in places)
    ]
    assert not missing
