"""`pytest tests/cuda --results FILE`: a line per test as it ends, with the kernels that it launched.

Tests that have a line are not run again, so that a run which a hanging or broken kernel ended can go on behind it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.commands import DEVICE_LOST
from benchmarks.gpu.results import read_tests

MESSAGE_CHARACTERS = 600
# A process that a kernel ends costs seconds, or a minute where it hangs: so many tests show that it always does.
FATAL_TESTS = 3


def fatal_kernels(tests: Iterable[Mapping[str, Any]]) -> set[str]:
    """Kernels that hung, or took the device along, in FATAL_TESTS tests, and passed none."""
    fatal: Counter[str] = Counter()
    passed: set[str] = set()
    for test in tests:
        if test["status"] == "hung" or test.get("fatal"):
            fatal.update(test.get("kernels", ()))
        elif test["status"] == "passed":
            passed.update(test.get("kernels", ()))
    return {kernel for kernel, n in fatal.items() if n >= FATAL_TESTS and kernel not in passed}


class Reporter:
    """Writes the lines. alive: whether the device still works."""

    def __init__(self, path: Path, alive: Callable[[], bool]) -> None:
        self._path, self._alive = path, alive
        self._test = ""
        self._launched: set[str] = set()
        self._last: dict[str, Any] = {}
        tests = read_tests(path)
        self._done = {test["id"] for test in tests}
        self._fatal = fatal_kernels(tests)

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out what has been run."""
        done = [item for item in items if item.nodeid in self._done]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """If nothing follows, the test hung."""
        self._test = nodeid
        self._launched.clear()
        self._write({"id": nodeid, "status": "hung"})

    def launching(self, kernel: str) -> None:
        """Notes a kernel before it is launched: it may never end. One that was fatal often enough is not launched."""
        if kernel in self._fatal:
            pytest.skip(f"{kernel} hung, or took the device along, in {FATAL_TESTS} tests and passed none")
        if kernel not in self._launched:
            self._launched.add(kernel)
            self._write({"id": self._test, "status": "hung", "kernels": sorted(self._launched)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The result of a test, or of a set-up that failed or skipped it."""
        if report.when != "call" and report.outcome == "passed":
            return
        entry = {"id": report.nodeid, "status": report.outcome, "seconds": round(report.duration, 3)}
        entry["kernels"] = sorted(self._launched)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            entry["message"] = str(crash.message if crash else report.longrepr)[:MESSAGE_CHARACTERS]
        self._last = entry
        self._write(entry)

    def pytest_runtest_logfinish(self) -> None:
        """After a test that the device did not survive nothing else can run in this process."""
        if not self._alive():
            self._write({**self._last, "fatal": True})
            pytest.exit("the device takes no work any more", returncode=DEVICE_LOST)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Nothing left to run is no failure."""
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._done:
            session.exitstatus = pytest.ExitCode.OK
