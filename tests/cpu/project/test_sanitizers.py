"""Threads and work memory of the executor under sanitizers; scripts/test_sanitized runs the whole native core so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import ROOT

NATIVE = ROOT / "ikpy" / "_native"
PROGRAMS = ROOT / "tests" / "sanitizers"
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", f"-I{NATIVE / 'include'}", f"-I{NATIVE}")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None or not NATIVE.joinpath("kernels").is_dir(),
    reason="needs Linux, g++ and the sources",
)


def compile_program(target: Path, sources: list[Path], *flags: str) -> None:
    command = ["g++", *FLAGS, *flags, *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run_program(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it where the sanitizer finds its addresses free: without randomization if that can be had."""
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    fixed = [shutil.which("setarch"), "-R"] if shutil.which("setarch") else []
    if fixed and subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode:
        fixed = []
    return subprocess.run([*fixed, str(program), *arguments], env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", autouse=True)
def working_sanitizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("nothing")
    folder.joinpath("nothing.cpp").write_text("int main() {}\n")
    try:
        compile_program(folder / "nothing", [folder / "nothing.cpp"])
    except AssertionError:
        pytest.skip("the compiler has no ThreadSanitizer")
    if run_program(folder / "nothing").returncode:
        pytest.skip("ThreadSanitizer does not run on this system")


def executor(folder: Path, source: str) -> Path:
    """The program over this text of executor.cpp."""
    file = folder / "executor.cpp"
    file.write_text(source)
    # Without -fopenmp at the link its functions are those of openmp.cpp, which the sanitizer understands.
    compile_program(folder / "executor.o", [file], "-fopenmp", "-c", f"-I{NATIVE / 'kernels'}")
    rest = [PROGRAMS / "executor.cpp", PROGRAMS / "openmp.cpp", NATIVE / "kernels" / "affinity.cpp"]
    compile_program(folder / "program", [folder / "executor.o", *rest], "-pthread")
    return folder / "program"


def test_threads_of_plans_do_not_race(tmp_path: Path) -> None:
    done = run_program(executor(tmp_path, NATIVE.joinpath("kernels", "executor.cpp").read_text()))
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("generation + 1, std::memory_order_release", "generation + 1, std::memory_order_relaxed"),
        ("if (groups > 1) meet(level + groups, own, groups);", ""),
    ],
    ids=["publishes nothing", "groups do not wait for each other"],
)
def test_a_broken_barrier_is_noticed(tmp_path: Path, right: str, wrong: str) -> None:
    """The program above could find a race."""
    source = NATIVE.joinpath("kernels", "executor.cpp").read_text()
    assert right in source
    done = run_program(executor(tmp_path, source.replace(right, wrong)))
    assert done.returncode and "data race" in done.stderr


def test_writes_behind_work_memory_are_noticed(tmp_path: Path) -> None:
    """Those of masked stores and tiles, which AddressSanitizer does not see."""
    flags = ("-fno-sanitize=thread", "-fsanitize=address")
    compile_program(tmp_path / "program", [PROGRAMS / "work_guard.cpp"], *flags)
    for position, found in ((127, ""), (128, "(shared)"), (255, ""), (256, "(a thread's)"), (447, "(a thread's)")):
        done = run_program(tmp_path / "program", str(position))
        assert (done.returncode != 0) == bool(found), f"{position}: {done.returncode} {done.stderr[:2000]}"
        assert found in done.stderr
