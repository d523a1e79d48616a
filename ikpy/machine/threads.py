"""Number of threads this process should use."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from ikpy.machine import control_groups
from ikpy.machine.control_groups import read

CPU_ROOT = Path("/sys/devices/system/cpu")
MANY = 1 << 20


@cache
def usable_cpus() -> tuple[int, ...]:
    """Hardware threads this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def hardware_threads() -> int:
    """Number of hardware threads this process may run on."""
    return len(usable_cpus())


def pool(n: int) -> ThreadPoolExecutor:
    """n threads on all usable CPUs: new ones would share the CPUs of the thread that starts them, if it is bound."""
    return ThreadPoolExecutor(n, initializer=_unbind)


def is_lack_of_threads(error: BaseException) -> bool:
    """Whether an error says that the system starts no more threads."""
    return isinstance(error, RuntimeError) and str(error).startswith("can't start new thread")


def _unbind() -> None:
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # CPUs were taken away from this process meanwhile
            os.sched_setaffinity(0, usable_cpus())


def _quota_of(folder: Path) -> float:
    """CPUs' worth of time that a control group may take, infinity for no limit."""
    text = read(folder / "cpu.max") or " ".join(
        read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")
    )
    quota, _, period = text.partition(" ")
    is_limit = quota.isdigit() and period.isdigit() and int(period) > 0
    return int(quota) / int(period) if is_limit else math.inf


def cpu_quota() -> float:
    """CPUs' worth of time that this process may take in its control groups (containers), infinity for no limit."""
    return min(map(_quota_of, control_groups.folders("cpu")), default=math.inf)


@cache
def physical_cores() -> int:
    """Threads to use: one per physical core that this process may run on, as far as its share of CPU time reaches.

    Threads that wait for each other lose most where a container's quota lets only some of them run.
    """
    return max(1, min(_physical_cores(), math.ceil(min(cpu_quota(), MANY))))


def _physical_cores() -> int:
    """Physical cores among the usable CPUs, at least 1; of a hybrid processor only the performance cores."""
    speed_of_core: dict[str, int] = {}
    for cpu in usable_cpus():
        siblings = read(CPU_ROOT / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        if siblings is None:
            return _physical_cores_elsewhere()
        speed = int(read(CPU_ROOT / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq") or 0)
        speed_of_core[siblings] = max(speed, speed_of_core.get(siblings, 0))
    fastest = max(speed_of_core.values())
    # Efficiency cores of hybrid processors clock well below the performance cores; favoured cores only slightly higher.
    return sum(1 for speed in speed_of_core.values() if speed >= 0.8 * fastest)


def _physical_cores_elsewhere() -> int:
    import psutil

    return max(1, min(psutil.cpu_count(logical=False) or hardware_threads(), hardware_threads()))
