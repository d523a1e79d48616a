"""Loads a model as a tool does, decodes, and tells where threads and pages are: for machines with several memory nodes.

`python -m tests.numa.probe` reads a request per line, JSON, and answers each from a forked process of its own:

    {"arguments": [...], "cpus": [...], "start": cpu, "policy": [mode, nodes], "tool": "cli" | "bench" | "read"}

cpus and policy (number of set_mempolicy, list of nodes) are what numactl would leave behind; start is the CPU that the
process begins on without being bound to it; "read" only reads the file named by the arguments, which leaves its pages
in the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ikpy.cli import bench
from ikpy.cli.session import load
from ikpy.cli.start import start
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.graph.ir import Value
from ikpy.machine.page_nodes import pages_by_node

PROMPT_TOKENS = 2
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def nodes_of(values: list[Value]) -> Counter[int]:
    """Pages by node of the memory behind values."""
    buffers = {id(v.buffer): v.buffer for v in values if v.buffer.address}
    return sum((pages_by_node(b.address or 0, b.nbytes) for b in buffers.values()), Counter())


def cpus_of_threads() -> dict[int, list[int]]:
    """CPUs that every thread of this process may run on, by thread id."""
    return {task: sorted(os.sched_getaffinity(task)) for task in map(int, os.listdir("/proc/self/task"))}


def decode(context: Context) -> dict[str, Any]:
    """CPUs of the threads that a prompt and a token after it take."""
    before = set(cpus_of_threads()) - {os.getpid()}
    found = {}
    for phase, first, tokens in (("prompt", 0, list(range(PROMPT_TOKENS))), ("token", PROMPT_TOKENS, [5])):
        context.decode(Batch.single(tokens, first))
        found[phase] = sorted(cpus for task, cpus in cpus_of_threads().items() if task not in before)
    return found


def huge_bytes(address: int) -> int:
    """Bytes in reserved huge pages of the mapping that holds an address."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split(" ", 1)[0]
        if not word.endswith(":"):
            low, high = (int(part, 16) for part in word.split("-"))
            inside = low <= address < high
        elif inside and word == "Private_Hugetlb:":
            total += int(line.split()[1]) * 1024
    return total


def mapped_nodes(path: str) -> dict[int, int]:
    """Pages by node of a mapped file as /proc/self/numa_maps counts them."""
    found: Counter[int] = Counter()
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        words = line.split()
        if f"file={path}" in words:
            found.update({int(w[1:].split("=")[0]): int(w.split("=")[1]) for w in words if w[0] == "N" and "=" in w})
    return dict(found)


def run_model(arguments: list[str]) -> dict[str, Any]:
    """What became of a model under these options of `ikpy cli`."""
    params = start("cli", arguments, "probe")
    assert params is not None
    session = load(params)
    context = session.new_context()
    threads = decode(context)
    shard = session.model.gguf.shards[0]
    return {
        "threads": threads,
        "n_threads": [params.n_threads, params.n_threads_batch],
        "weights": nodes_of(list(session.model.weights.values())),
        "cache": nodes_of(list(context.kv.tensors.values())),
        "arena": pages_by_node(context._plans.arena.ctypes.data, context._plans.arena.nbytes),
        "file": pages_by_node(shard.data.ctypes.data, shard.data.nbytes),
        "maps": mapped_nodes(shard.path),
        "mapped": shard.mapped,
        "reserved": huge_bytes(shard.data.ctypes.data),
        "repacked": len(session.model.replaced),
    }


def run_bench(arguments: list[str]) -> dict[str, Any]:
    """The first result of `ikpy bench`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        bench.run([*arguments, "-o", "json"])
    return {"bench": json.loads(out.getvalue())[0]}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request, in a process that is not used again."""
    if cpus := request.get("cpus"):
        os.sched_setaffinity(0, cpus)
    if policy := request.get("policy"):
        mode, nodes = policy
        mask = ctypes.c_uint64(sum(1 << n for n in nodes))
        call = ctypes.c_long(SET_MEMPOLICY[platform.machine()])
        if ctypes.CDLL(None).syscall(call, ctypes.c_long(mode), ctypes.byref(mask), ctypes.c_ulong(65)):
            raise OSError("set_mempolicy was refused")
    if (cpu := request.get("start")) is not None:
        usable = os.sched_getaffinity(0)
        os.sched_setaffinity(0, [cpu])
        os.sched_setaffinity(0, usable)  # stays where it is until the system has a reason to move it
    arguments, tool = request["arguments"], request.get("tool", "cli")
    if tool == "read":
        return {"read": len(Path(arguments[0]).read_bytes())}
    log = io.StringIO()
    with contextlib.redirect_stderr(log):
        found = run_bench(arguments) if tool == "bench" else run_model(arguments)
    return {**found, "log": log.getvalue().splitlines()}


def main() -> None:
    """Answers requests until standard input ends. Forking saves a process the time of all imports."""
    for line in sys.stdin:
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            reply = answer(json.loads(line))
        except BaseException as error:
            reply = {"error": repr(error)}
        print(json.dumps(reply), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
