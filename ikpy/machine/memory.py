"""The memory that this process may use: what is asked for beyond it is refused, since the system would give it and end
the process once it is used."""

from __future__ import annotations

from ikpy.errors import ResourceError
from ikpy.machine import control_groups

GIB = 1 << 30


def machine_memory(*, swap: bool = True) -> int:
    """Bytes of memory and swap space, or of memory alone, as far as the limits of control groups let them be used."""
    import psutil

    limits = control_groups.memory_limits()
    memory = _least(psutil.virtual_memory().total, limits.memory)
    if not swap:
        return memory
    return _least(memory + _least(psutil.swap_memory().total, limits.swap), limits.both)


def available_memory() -> int:
    """Bytes of memory that this process may take before what is in use has to leave it."""
    import psutil

    return min(machine_memory(swap=False), psutil.virtual_memory().available)


def _least(available: int, limit: int | None) -> int:
    return int(available if limit is None else min(available, limit))


def memory_owner() -> str:
    """Subject and verb in front of what `machine_memory` gives: "the machine has", or whose limit counts."""
    import psutil

    is_limited = machine_memory(swap=False) < psutil.virtual_memory().total
    return "the container or control group may use" if is_limited else "the machine has"


def check_memory(nbytes: int, what: str, remedy: str) -> None:
    """ResourceError if this process may use less than that. what: begins the reason, as in "a cache takes"."""
    total = machine_memory()
    if nbytes > total:
        raise ResourceError(
            f"not enough memory ({what} {nbytes / GIB:.1f} GiB, {memory_owner()} {total / GIB:.1f} GiB): {remedy}"
        )
