"""Control groups that this process is in (containers, units of systemd, jobs of Slurm) and their memory limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_GROUPS = Path("/proc/self/cgroup")


class MemoryLimits(NamedTuple):
    """Bytes at most, None without a limit: of memory, of swap space (version 2), of both together (version 1)."""

    memory: int | None = None
    swap: int | None = None
    both: int | None = None


def folders(controller: str) -> Iterator[Path]:
    """Folders of the groups that bound this process, outer ones first; some may not exist.

    controller: as version 1 names it, such as `cpu`; groups of version 2 are given whatever it is. A container sees its
    own group as the root.
    """
    for line in (read(PROCESS_GROUPS) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUP_ROOT / controller if controllers else GROUP_ROOT
        yield root
        parts = Path(path).parts
        yield from (root.joinpath(*parts[1 : i + 1]) for i in range(1, len(parts)))


def memory_limits() -> MemoryLimits:
    """The least limits of all groups of this process."""
    groups = list(folders("memory"))

    def least(*names: str) -> int | None:
        texts = (read(folder / name) or "" for folder in groups for name in names)
        return min((int(text) for text in texts if text.isdigit()), default=None)

    return MemoryLimits(
        least("memory.max", "memory.limit_in_bytes"), least("memory.swap.max"), least("memory.memsw.limit_in_bytes")
    )


def read(path: Path) -> str | None:
    """Text of a small file of the system without white space around it, None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
