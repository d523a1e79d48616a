"""Links of the documentation and citations in comments lead to something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.shared import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
CODE = (".py", ".pyx", ".pxd", ".hpp", ".cpp", ".cuh", ".cu")
FOLDERS = ("ikpy", "tests", "benchmarks", "scripts")
# Names of documents that only their authors have.
UNKNOWN_DOCUMENTS = re.compile(
    r"(quant.formats|tools|model semantics|specification)[,.]?( sections?)? \d+(\.\d+)*\b|tools specification|§",
    re.IGNORECASE,
)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Names of a page's headings in links, as the hosts of repositories make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def source_files() -> Iterator[Path]:
    """Source files that belong to the repository."""
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in CODE and path != Path(__file__))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


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
