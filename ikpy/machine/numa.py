"""NUMA machines: which memory nodes there are, and where threads and memory of this process go.

`apply` is for the start of a program, before a model is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ikpy.errors import UsageError
from ikpy.machine import threads
from ikpy.machine.page_nodes import cached_pages_by_node

MODES = ("distribute", "isolate", "numactl")
NODES = Path("/sys/devices/system/node")
BALANCING = Path("/proc/sys/kernel/numa_balancing")
_DEFAULT, _INTERLEAVE = 0, 3  # MPOL_DEFAULT and MPOL_INTERLEAVE
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system calls
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}

_WITHOUT_FLAGS = 0xFFF  # of MPOL_F_STATIC_NODES and the like
_ENOUGH_PAGES = 16

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


def on_one_of_several() -> bool:
    """Whether the machine has several memory nodes and this process uses the CPUs of one."""
    return len(nodes()) == 1 and len(list(NODES.glob("node[0-9]*"))) > 1


def apply(mode: str, log: Callable[[str], None]) -> None:
    """Places threads and memory of this process.

    distribute: thread i of every computation on node i % nodes, memory spread over the nodes page by page unless a
    memory policy was inherited (numactl --interleave, -m). isolate: all threads on the node this call runs on, memory
    where they touch it first. numactl: the CPUs and the memory policy that were inherited.

    On a machine with one node (or none known) only a line in the log says so. UsageError for other modes.
    """
    if mode not in MODES:
        raise UsageError(f"--numa: expected one of {' '.join(MODES)}, got {mode!r}")
    found = nodes()
    if len(found) < 2:
        log(f"numa: one memory node for this process, '{mode}' changes nothing")
    elif mode == "distribute":
        _distribute(found, log)
    elif mode == "isolate":
        _isolate(found, log)
    else:
        log(f"numa: CPUs as inherited: {len(threads.usable_cpus())} on nodes {_numbers(found)}")
    # The kernel looks for pages to move in processes bound to one node as well.
    if _balancing():
        log("WARNING: /proc/sys/kernel/numa_balancing is enabled, this has been observed to impair performance")


def advice() -> str:
    """What to tell a user who did not choose a mode; "" where nothing is to be gained."""
    if len(found := nodes()) < 2 or _policy() != _DEFAULT:
        return ""
    return (
        f"note: {len(found)} memory nodes and no --numa: memory lies where it is touched first; "
        "'--numa distribute' uses all nodes evenly, '--numa isolate' one of them"
    )


def advice_on_file(mode: str, mapped: Iterable[np.ndarray]) -> str:
    """Says when pages of a mapped file are in memory already (from an earlier reading) on the wrong nodes, else "".

    Wrong are an uneven share where memory is spread over the nodes, and other nodes than the one of --numa isolate.
    Looks at a sample of the pages.
    """
    spread, found = _policy() == _INTERLEAVE, nodes()
    if not spread and mode != "isolate":
        return ""
    count = sum((cached_pages_by_node(area) for area in mapped), Counter[int]())
    total = count.total()
    if total < _ENOUGH_PAGES:
        return ""
    if spread:
        wrong = len(found) > 1 and max(count.values()) > 1.5 * total / len(found)
    else:
        wrong = sum(n for node, n in count.items() if node not in found) > total / 10
    if not wrong:
        return ""
    shares = ", ".join(f"node {node} {100 * n / total:.0f} %" for node, n in sorted(count.items()))
    return (
        f"numa: pages of the model file are in memory from an earlier reading and stay there ({shares}); "
        "load with --no-mmap, or let go of them first: echo 3 > /proc/sys/vm/drop_caches"
    )


def _numbers(found: Nodes) -> str:
    return ", ".join(map(str, found))


def _distribute(found: Nodes, log: Callable[[str], None]) -> None:
    from ikpy._native import core

    threads.physical_cores()  # counted before the calling thread is bound to a part of the CPUs
    core.set_thread_cpus([list(cpus) for cpus in found.values()])
    log(f"numa: threads take turns on nodes {_numbers(found)}")
    if _policy() != _DEFAULT:
        log("numa: memory as the inherited policy says")
    elif problem := interleave(list(found)):
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
        return bool(int(BALANCING.read_text()) & 1)
    except (OSError, ValueError):
        return False


def _policy() -> int:
    """Number of this thread's memory policy, the default one if unknown."""
    call = _system_call(_GET_MEMPOLICY)
    mode = ctypes.c_int(_DEFAULT)
    if call is None or call(ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)):
        return _DEFAULT
    return mode.value & _WITHOUT_FLAGS


def _system_call(numbers: dict[str, int]) -> Callable[..., int] | None:
    number = numbers.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return partial(libc.syscall, ctypes.c_long(number))


def interleave(numbers: Sequence[int]) -> str:
    """Spreads memory that this thread and threads it starts touch first over the nodes; says what went wrong, or ""."""
    call = _system_call(_SET_MEMPOLICY)
    if call is None:
        return "not known how on this system"
    bits = 64 * (max(numbers) // 64 + 1)
    words = (ctypes.c_uint64 * (bits // 64))()
    for number in numbers:
        words[number // 64] |= 1 << number % 64
    failed = call(ctypes.c_long(_INTERLEAVE), ctypes.byref(words), ctypes.c_ulong(bits + 1))
    return os.strerror(ctypes.get_errno()) if failed else ""
