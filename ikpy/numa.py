"""NUMA machines: which memory nodes there are, and where threads and memory of this process go.

`apply` is for the start of a program, before a model is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ikpy import threads
from ikpy.errors import UsageError

MODES = ("distribute", "isolate", "numactl")
NODES = Path("/sys/devices/system/node")
BALANCING = Path("/proc/sys/kernel/numa_balancing")
_INTERLEAVE = 3  # MPOL_INTERLEAVE of set_mempolicy
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call

Nodes = dict[int, tuple[int, ...]]


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Numbers of a list such as "0-3,8,10-11"."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def nodes() -> Nodes:
    """Memory nodes with the CPUs of each that this process may use, nodes without one left out; {} if unknown."""
    usable = set(threads.usable_cpus())
    found: Nodes = {}
    for folder in sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            own = parse_cpu_list((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus := tuple(cpu for cpu in own if cpu in usable):
            found[int(folder.name[4:])] = cpus
    return found


def apply(mode: str, log: Callable[[str], None]) -> None:
    """Places threads and memory of this process.

    distribute: thread i of every computation on node i % nodes, memory spread over the nodes page by page.
    isolate: all threads on the node this call runs on. numactl: the CPUs and the memory policy that were inherited.

    On a machine with one node (or none known) only a line in the log says so. UsageError for other modes.
    """
    if mode not in MODES:
        raise UsageError(f"--numa: expected one of {' '.join(MODES)}, got {mode!r}")
    found = nodes()
    if len(found) < 2:
        log(f"numa: one memory node for this process, '{mode}' changes nothing")
        return
    if mode == "distribute":
        _distribute(found, log)
    elif mode == "isolate":
        _isolate(found, log)
    else:
        log(f"numa: CPUs as inherited: {len(threads.usable_cpus())} on nodes {_numbers(found)}")
    if _balancing():
        log("WARNING: /proc/sys/kernel/numa_balancing is enabled, this has been observed to impair performance")


def _numbers(found: Nodes) -> str:
    return ", ".join(map(str, found))


def _distribute(found: Nodes, log: Callable[[str], None]) -> None:
    from ikpy._native import core

    threads.physical_cores()  # counted before the calling thread is bound to a part of the CPUs
    core.set_thread_cpus([list(cpus) for cpus in found.values()])
    log(f"numa: threads take turns on nodes {_numbers(found)}")
    if problem := interleave(list(found)):
        log(f"numa: memory is not spread over the nodes: {problem}; start under numactl --interleave=all instead")


def _isolate(found: Nodes, log: Callable[[str], None]) -> None:
    here = _current_cpu()
    node, cpus = next(((n, cpus) for n, cpus in found.items() if here in cpus), next(iter(found.items())))
    for task in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(task, cpus)
    threads.usable_cpus.cache_clear()
    threads.physical_cores.cache_clear()
    log(f"numa: all threads on node {node} ({len(cpus)} CPUs)")


def _current_cpu() -> int:
    return int(ctypes.CDLL(None).sched_getcpu())


def _balancing() -> bool:
    try:
        return BALANCING.read_text().strip() == "1"
    except OSError:
        return False


def interleave(numbers: Sequence[int]) -> str:
    """Spreads memory that this thread and threads it starts touch first over the nodes; says what went wrong, or ""."""
    call = _SET_MEMPOLICY.get(platform.machine()) if sys.platform == "linux" else None
    if call is None:
        return "not known how on this system"
    bits = 64 * (max(numbers) // 64 + 1)
    words = (ctypes.c_uint64 * (bits // 64))()
    for number in numbers:
        words[number // 64] |= 1 << number % 64
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    failed = libc.syscall(
        ctypes.c_long(call), ctypes.c_long(_INTERLEAVE), ctypes.byref(words), ctypes.c_ulong(bits + 1)
    )
    return os.strerror(ctypes.get_errno()) if failed else ""
