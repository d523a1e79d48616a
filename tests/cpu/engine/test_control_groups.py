"""Memory limits of control groups, read from folders like those of containers, units of systemd and jobs of Slurm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ikpy.cli.info import memory_limit
from ikpy.engine.memory import MemoryReport
from ikpy.errors import ResourceError
from ikpy.machine import control_groups
from ikpy.machine import memory as machine_memory
from ikpy.machine.control_groups import MemoryLimits as Limits

GIB = 1 << 30
NO_LIMIT = 9223372036854771712


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {"memory.max": GIB}, Limits()),
        ("0::/\n", {}, Limits()),
        ("0::/\n", {"memory.max": 3 * GIB}, Limits(memory=3 * GIB)),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/step/memory.swap.max": "max"}, Limits()),
        ("0::/job/step\n", {"job/step/memory.max": 8 * GIB, "job/memory.max": 4 * GIB}, Limits(memory=4 * GIB)),
        ("0::/job/step\n", {"job/step/memory.max": 2 * GIB, "job/memory.max": "max"}, Limits(memory=2 * GIB)),
        ("0::/job/step\n", {"job/memory.max": GIB, "job/step/memory.swap.max": 0}, Limits(memory=GIB, swap=0)),
        ("0::/job/step\n", {"other/memory.max": GIB, "job/step/memory.max": ""}, Limits()),
        ("0::/not/seen/here\n", {"memory.max": 3 * GIB}, Limits(memory=3 * GIB)),
        ("4:memory,hugetlb:/docker/1f\n0::/\n", {"memory/memory.limit_in_bytes": GIB}, Limits(memory=GIB)),
        (
            "1:cpu:/x\n4:memory:/a\n0::/\n",
            {
                "memory/memory.limit_in_bytes": NO_LIMIT,
                "memory/a/memory.limit_in_bytes": 5 * GIB,
                "memory/a/memory.memsw.limit_in_bytes": 6 * GIB,
                "memory/x/memory.limit_in_bytes": GIB,
            },
            Limits(memory=5 * GIB, both=6 * GIB),
        ),
    ],
)
def test_the_least_limit_of_nested_groups_counts(
    groups: str, files: dict[str, object], expected: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_groups, "GROUP_ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "PROCESS_GROUPS", tmp_path / "cgroup")
    for name, value in {"cgroup": groups, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    assert control_groups.memory_limits() == expected


@pytest.mark.parametrize(
    ("limits", "alone", "with_swap"),
    [
        (Limits(), 64, 80),
        (Limits(memory=NO_LIMIT, both=NO_LIMIT), 64, 80),
        (Limits(memory=8 * GIB), 8, 24),
        (Limits(memory=8 * GIB, swap=0), 8, 8),
        (Limits(memory=8 * GIB, swap=GIB), 8, 9),
        (Limits(memory=8 * GIB, both=10 * GIB), 8, 10),
    ],
)
def test_what_may_be_used(limits: Limits, alone: int, with_swap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=16 * GIB))
    monkeypatch.setattr(control_groups, "memory_limits", lambda: limits)
    assert machine_memory.machine_memory(swap=False) == alone * GIB
    assert machine_memory.machine_memory() == with_swap * GIB


def test_errors_and_warnings_say_whose_limit_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "memory_limits", lambda: Limits(memory=GIB // 2, swap=0))
    with pytest.raises(ResourceError, match=r"takes 1\.0 GiB, the container or control group may use 0\.5 GiB\): less"):
        machine_memory.check_memory(GIB, "it takes", "less")
    report = MemoryReport()
    report.add("CPU", "mapped", GIB)
    assert report.shortages()[0].startswith(
        "warning: CPU: 1024 MiB are needed, the container or control group may use 512"
    )
    assert memory_limit(psutil.virtual_memory().total) == "; the container or control group may use 0.5 GiB"
