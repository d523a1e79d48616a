"""Facts about the machine and the build: cores, memory, CPU name, version numbers."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from ikpy import __version__

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


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


@cache
def physical_cores() -> int:
    """Number of physical cores among the usable CPUs; only the performance cores of a hybrid processor."""
    cores: dict[tuple[int | None, int], int] = {}
    for cpu in usable_cpus():
        core = _read_number(CPU_ROOT / f"cpu{cpu}" / "topology" / "core_id")
        package = _read_number(CPU_ROOT / f"cpu{cpu}" / "topology" / "physical_package_id")
        if core is None:
            return _physical_cores_elsewhere()
        capacity = _read_number(CPU_ROOT / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq") or 0
        cores[package, core] = max(capacity, cores.get((package, core), 0))
    fastest = max(cores.values())
    # Efficiency cores of hybrid processors clock well below the performance cores; favoured cores only slightly higher.
    return sum(1 for speed in cores.values() if speed >= 0.8 * fastest) or 1


def _physical_cores_elsewhere() -> int:
    import psutil

    return min(psutil.cpu_count(logical=False) or 1, hardware_threads())


@cache
def cpu_name() -> str:
    """Model name of the first processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def build_number() -> int:
    """Version as an integer: 0.1.0 -> 100, 1.2.3 -> 10203."""
    major, minor, patch = (int(part) for part in __version__.split("+")[0].split(".")[:3])
    return major * 10000 + minor * 100 + patch


def build_commit() -> str:
    """Name of the build, shown where other programs show a commit."""
    return __version__


def compiler() -> str:
    """Compiler of the native core."""
    from ikpy._native import core

    return str(core.build_info()["compiler"])


def target() -> str:
    """Machine and operating system, such as x86_64-linux."""
    return f"{platform.machine()}-{platform.system().lower()}"


def version_lines() -> list[str]:
    """The two lines of --version."""
    return [f"version: {build_number()} ({build_commit()})", f"built with {compiler()} for {target()}"]


def peak_rss_mib() -> float:
    """Largest resident size of this process so far, in MiB."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if platform.system() == "Darwin" else peak / 2**10
