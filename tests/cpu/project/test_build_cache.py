"""The objects that setup.py keeps: compiled again when, and only when, something they are made from has changed."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import Distribution, Extension

from tests.shared import ROOT

HEADER = "inline int value() { return VALUE + 1; }\n"
SOURCES = {"one.cpp": '#include "value.hpp"\nint one() { return value(); }\n', "two.cpp": "int two() { return 2; }\n"}

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not (ROOT / "setup.py").is_file(), reason="needs g++ and the sources"
)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IKPY_JOBS", "1")
    for name, text in {"value.hpp": HEADER, **SOURCES}.items():
        Path(name).write_text(text)


def build(value: str = "1", flags: tuple[str, ...] = ("-O0",)) -> set[str]:
    """Builds as a new process would; the names of the sources that were compiled."""
    rules = runpy.run_path(str(ROOT / "setup.py"), run_name="rules")
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*.o")}
    extension = Extension(
        "part", sorted(SOURCES), define_macros=[("VALUE", value)], extra_compile_args=list(flags), language="c++"
    )
    command = rules["ParallelBuild"](Distribution({"name": "part", "ext_modules": [extension]}))
    command.ensure_finalized()
    command.run()
    after = {path: path.stat().st_mtime_ns for path in Path().rglob("*.o")}
    assert {path.stem for path in after} == {"one", "two"}
    return {path.stem for path, changed in after.items() if before.get(path) != changed}


def test_nothing_is_compiled_twice() -> None:
    assert build() == {"one", "two"}
    assert build() == set()
    for name in ("value.hpp", "one.cpp"):
        os.utime(name)
    assert build() == set(), "time stamps do not count"


def test_what_an_object_is_made_from_counts() -> None:
    build()
    Path("value.hpp").write_text(HEADER.replace("1", "2"))
    assert build() == {"one"}, "a header"
    Path("two.cpp").write_text("int two() { return 3; }\n")
    assert build() == {"two"}, "a source"
    assert build(value="7") == {"one", "two"}, "a macro"
    assert build(value="7", flags=("-O1",)) == {"one", "two"}, "a flag"
    assert build(value="7", flags=("-O1",)) == set()


def test_a_module_is_linked_from_the_objects_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when these are older than the module, which a build of the other kind has made meanwhile."""

    def module() -> bytes:
        (path,) = Path("build").glob("lib*/part*.so")
        return path.read_bytes()

    build()
    release = module()
    monkeypatch.setenv("IKPY_DEBUG_BUILD", "1")
    build(value="70")
    assert module() != release
    monkeypatch.delenv("IKPY_DEBUG_BUILD")
    assert build() == set()
    assert module() == release


def test_the_compiler_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    compiler = Path("other-g++")
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "another version"\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler.absolute()))
    monkeypatch.setenv("CC", str(compiler.absolute()))
    assert build() == {"one", "two"}
    compiler.write_text(compiler.read_text().replace("another", "a later"))
    assert build() == {"one", "two"}, "the same name, another version"


def test_an_interrupted_compilation_is_done_again() -> None:
    build()
    (key,) = Path().rglob("one.o.key")
    key.unlink()
    assert build() == {"one"}
    (made,) = Path().rglob("two.o")
    made.unlink()
    assert build() == {"two"}


def test_a_header_that_is_gone_is_noticed() -> None:
    build()
    Path("one.cpp").write_text("int one() { return 1; }\n")
    Path("value.hpp").unlink()
    assert build() == {"one"}
    assert build() == set()


CALLED = "import ctypes, sys; part = ctypes.CDLL(sys.argv[1]); print(part._Z3onev(), part._Z3twov())"


def build_cores(*tiers: str) -> dict[str, str]:
    """Builds modules of these names from the same sources, as a new process would; what their functions return."""
    rules = runpy.run_path(str(ROOT / "setup.py"), run_name="rules")
    extensions = [
        Extension(
            f"_core_{tier}", sorted(SOURCES), define_macros=MACROS[tier], extra_compile_args=["-O0"], language="c++"
        )
        for tier in tiers
    ]
    command = rules["ParallelBuild"](Distribution({"name": "part", "ext_modules": extensions}))
    command.ensure_finalized()
    command.run()
    paths = {tier: next(Path("build").glob(f"lib*/_core_{tier}*.so")).absolute() for tier in tiers}
    return {
        tier: subprocess.check_output([sys.executable, "-c", CALLED, path], text=True).strip()
        for tier, path in paths.items()
    }


MACROS = {"avx2": [("VALUE", "1")], "avxvnni": [("VALUE", "1"), ("__AVXVNNI__", "1")]}


def test_a_core_takes_the_objects_of_another_one_where_both_would_be_the_same() -> None:
    """Only files that ask for the dot products of bytes are compiled for both, or all where the other is not built."""
    Path("value.hpp").write_text("#ifdef __AVXVNNI__\ninline int value() { return 7; }\n#else\n" + HEADER + "#endif\n")
    assert build_cores("avx2", "avxvnni") == {"avx2": "2 2", "avxvnni": "7 2"}
    assert {path.stem for path in Path().rglob("_core_avxvnni/*.o")} == {"one"}
    assert {path.stem for path in Path().rglob("_core_avx2/*.o")} == {"one", "two"}
    Path("two.cpp").write_text("int two() { return 3; }\n")
    assert build_cores("avxvnni") == {"avxvnni": "7 3"}
    assert {path.stem for path in Path().rglob("_core_avxvnni/*.o")} == {"one", "two"}


def test_the_precompiled_header_is_used_and_not_kept() -> None:
    """It saves half a second of every file, and its compiled form takes 60 MB."""
    Path("two.cpp").write_text("int two() { return static_cast<int>(std::string(2, 'x').size()); }\n")
    assert build_cores("avx2") == {"avx2": "2 2"}
    assert not list(Path().rglob("*.gch"))


GENERATE = """
import runpy
from Cython.Build import cythonize
rules = runpy.run_path("setup.py", run_name="rules")
extensions = [rules["plain_extension"](name) for name in ("first", "second")]
cythonize(extensions, build_dir="build/cython/generated", quiet=True)
"""


def test_modules_are_generated_again_when_a_shared_declaration_changes() -> None:
    """Also the module whose own it is: a class must have the same layout everywhere."""
    native = Path("ikpy/_native")
    native.mkdir(parents=True)
    for name in ("ikpy/__init__.py", "ikpy/_native/__init__.py"):
        Path(name).touch()
    shutil.copy(ROOT / "setup.py", "setup.py")
    declared = "cdef class First:\n    cdef int old_field\n"
    (native / "first.pxd").write_text(declared)
    (native / "first.pyx").write_text("cdef class First:\n    pass\n")
    (native / "second.pyx").write_text("from ikpy._native.first cimport First\n")

    def generated() -> list[str]:
        subprocess.run([sys.executable, "-c", GENERATE], check=True)
        return [path.read_text() for path in sorted(Path("build/cython/generated").rglob("*.cpp"))]

    before = generated()
    assert len(before) == 2
    (native / "first.pxd").write_text(declared.replace("old_field", "new_field"))
    assert all("old_field" in text for text in before) and all("new_field" in text for text in generated())
