"""Facts about the machine and the build: memory, CPU name, version numbers."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from ikpy import __version__


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
