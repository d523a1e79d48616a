"""The memory of the machine: what is asked for beyond it is refused, since the system would give it and end the process
once it is used."""

from __future__ import annotations

from ikpy.errors import ResourceError

GIB = 1 << 30


def machine_memory(*, swap: bool = True) -> int:
    """Bytes of memory and swap space, or of memory alone."""
    import psutil

    return int(psutil.virtual_memory().total + (psutil.swap_memory().total if swap else 0))


def check_memory(nbytes: int, what: str, remedy: str) -> None:
    """ResourceError if the machine has less than that. what: begins the reason, as in "a cache takes"."""
    total = machine_memory()
    if nbytes > total:
        raise ResourceError(
            f"not enough memory ({what} {nbytes / GIB:.1f} GiB, the machine has {total / GIB:.1f} GiB): {remedy}"
        )
