"""Imports point one way, as docs/architecture.md draws it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ikpy

ROOT = Path(ikpy.__file__).parent
ALLOWED = {
    "errors": "",
    "file_locks": "",
    "signals": "",
    "_native": "errors",
    "machine": "errors _native",
    "quants": "errors",
    "vocab": "errors",
    "gguf": "errors machine quants",
    "graph": "errors quants",
    "backends": "errors file_locks machine signals _native gguf graph quants",
    "models": "errors machine _native gguf graph quants",
    "vision": "errors machine _native backends gguf graph models quants",
    "sound": "errors backends gguf graph models vision",
    "engine": "errors machine signals _native backends gguf graph models quants",
    "convert": "errors machine _native gguf models quants vision vocab",
    "tools": "errors file_locks machine signals _native backends engine gguf graph models quants sound vision vocab",
    "llm": "errors engine tools vocab",
    "server": "errors engine gguf quants sound tools vocab",
    "cli": "errors machine signals _native backends convert engine gguf graph models quants server sound tools vision "
    "vocab",
    "__main__": "cli signals",
}
"""Packages and modules below `ikpy` that each may import; all may read what `ikpy/__init__.py` itself defines."""
ONE_PLACE = {
    "pycuda": {"backends.cuda.driver"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "typer": {"cli"},
    "rich": {"cli", "tools.quantize_progress"},
    "jinja2": {"vocab"},
    "tokenizers": {"vocab", "convert"},
    "llguidance": {"engine"},
    "xxhash": {"tools.gguf_hash"},
    "PIL": {"vision"},
    "miniaudio": {"sound"},
}
"""Libraries and who may import them."""


def name_of(path: Path) -> str:
    """Dotted name below `ikpy` of a source file; the package itself for its ``__init__.py``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, ast.Module]:
    """All modules below `ikpy` by name; of Cython files the import lines."""
    found = {name_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    for path in sorted(ROOT.rglob("*.pyx")):
        lines = re.findall(r"^ *((?:from [\w.]+ )?import [\w.]+)", path.read_text(), re.MULTILINE)
        found[name_of(path)] = ast.parse("\n".join(lines))
    return found


def imported(node: ast.AST) -> list[str]:
    """Full names that an import statement reads; none of other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.module and not node.level, ast.unparse(node)
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def package_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def inner_imports(nodes: Iterator[ast.AST]) -> set[str]:
    """Names below `ikpy` that statements import, without what `ikpy/__init__.py` defines."""
    names = {name.removeprefix("ikpy.") for node in nodes for name in imported(node) if name.startswith("ikpy.")}
    packages = {package_of(module) for module in sources() if module}
    return {name for name in names if package_of(name) in packages}


PACKAGES = sorted({package_of(name_of(path)) for pattern in ("*.py", "*.pyx") for path in ROOT.rglob(pattern)} - {""})


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_what_lies_below_it(package: str) -> None:
    allowed = {package, *ALLOWED[package].split()}
    for name, tree in sources().items():
        if package_of(name) == package:
            wrong = {other for other in inner_imports(ast.walk(tree)) if package_of(other) not in allowed}
            assert not wrong, f"{name} imports {sorted(wrong)}"


def test_the_table_has_an_order() -> None:
    assert set(ALLOWED) == {package_of(name) for name in sources() if name}
    TopologicalSorter({name: below.split() for name, below in ALLOWED.items()}).prepare()


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a module outside functions and of what only type checkers read."""
    for child in ast.iter_child_nodes(tree):
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not typing_only and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from run_at_import(child)


def test_modules_import_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name, tree in sources().items():
        wanted = inner_imports(run_at_import(tree))
        graph[name] = {other if other in sources() else other.rpartition(".")[0] for other in wanted} - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("path", sorted((ROOT.parent / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_load_without_the_tests(path: Path) -> None:
    """The source distribution has the benchmarks and leaves the tests out."""
    wanted = [name for node in run_at_import(ast.parse(path.read_text())) for name in imported(node)]
    assert not [name for name in wanted if package_of(name) == "tests"]


@pytest.mark.parametrize("library", ONE_PLACE)
def test_a_library_is_imported_in_its_place(library: str) -> None:
    users = {
        name
        for name, tree in sources().items()
        if any(package_of(wanted) == library for node in ast.walk(tree) for wanted in imported(node))
    }
    assert users, f"nothing imports {library}"
    wrong = {name for name in users if not any(f"{name}.".startswith(f"{place}.") for place in ONE_PLACE[library])}
    assert not wrong, wrong
