"""Number of threads this process should use."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

CPU_ROOT = Path("/sys/devices/system/cpu")


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


def _unbind() -> None:
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # CPUs were taken away from this process meanwhile
            os.sched_setaffinity(0, usable_cpus())


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


@cache
def physical_cores() -> int:
    """Physical cores among the usable CPUs, at least 1; of a hybrid processor only the performance cores."""
    speed_of_core: dict[str, int] = {}
    for cpu in usable_cpus():
        siblings = _read(CPU_ROOT / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        if siblings is None:
            return _physical_cores_elsewhere()
        speed = int(_read(CPU_ROOT / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq") or 0)
        speed_of_core[siblings] = max(speed, speed_of_core.get(siblings, 0))
    fastest = max(speed_of_core.values())
    # Efficiency cores of hybrid processors clock well below the performance cores; favoured cores only slightly higher.
    return sum(1 for speed in speed_of_core.values() if speed >= 0.8 * fastest)


def _physical_cores_elsewhere() -> int:
    import psutil

    return max(1, min(psutil.cpu_count(logical=False) or hardware_threads(), hardware_threads()))
