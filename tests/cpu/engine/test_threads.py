"""How many threads a process should use."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ikpy.machine import control_groups, threads
from tests.shared import ROOT


@pytest.fixture(name="groups")
def fake_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty tree of control groups in place of the machine's, on a machine of 16 cores."""
    monkeypatch.setattr(control_groups, "GROUP_ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "PROCESS_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(threads, "_physical_cores", lambda: 16)
    threads.physical_cores.cache_clear()
    yield tmp_path
    threads.physical_cores.cache_clear()


@pytest.mark.parametrize(
    ("groups_of_process", "files", "quota", "n_threads"),
    [
        ("", {}, math.inf, 16),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf, 16),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5, 3),
        ("0::/\n", {"cpu.max": "20000 100000\n"}, 0.2, 1),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, 4.0, 4),
        ("0::/gone/from/here\n", {"cpu.max": "broken"}, math.inf, 16),
        (
            "4:memory:/x\n1:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"},
            3,
            3,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf, 16),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "0"}, math.inf, 16),
    ],
)
def test_a_share_of_cpu_time(groups: Path, groups_of_process, files, quota, n_threads) -> None:
    (groups / "cgroup").write_text(groups_of_process)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    assert threads.cpu_quota() == quota
    assert threads.physical_cores() == n_threads


def test_more_threads_than_cpus_are_remarked_on() -> None:
    n = threads.hardware_threads()
    for line in (["cli", "-p", "x", "-n", "1"], ["bench", "-p", "1", "-n", "0", "-r", "1"]):
        for count, wanted in ((n, 0), (n + 1, 1)):
            command = [sys.executable, "-m", "ikpy", *line, "-t", str(count)]
            result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
            assert result.returncode == 0, result.stderr[-300:]
            assert result.stderr.count(f"warning: {n + 1} threads on {n} CPUs") == wanted
