"""How the common tools begin: parameters, help and version, warnings, threads and memory nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ikpy.backends.remote import hosts
from ikpy.cli import log_streams
from ikpy.cli.params import CommonParams
from ikpy.cli.parser import parse
from ikpy.cli.thread_options import place_threads
from ikpy.cli.values import MAX_THREADS

WORKER = "IKPY_WORKER"
"""Set in the environment of processes that serve one model of --models-dir."""


def start(tool: str, arguments: Sequence[str], title: str, command: str = "") -> CommonParams | None:
    """Parameters of a tool, or None when it only had to print help or version. Warnings go to standard error.

    command: what the help names, where it is not the tool whose options are taken.
    """
    params = parse(arguments, tool)
    hosts.use(params.model.rpc)
    if params.action == "help":
        from ikpy.cli.help import print_tool_help

        print_tool_help(tool, title, command or tool)
        return None
    if params.action == "devices":
        print_devices()
        return None
    if params.action == "version":
        from ikpy.tools.machine import version_lines

        print(*version_lines(), sep="\n", file=sys.stderr)
        return None
    if not os.environ.get(WORKER):  # the router copies what the processes of its models print
        log_streams.install(params.log)
    for line in params.warnings:
        print(f"warning: {line}", file=sys.stderr)
    limit = place_on_nodes(params.model.numa)
    place_threads(params, lambda line: print(f"warning: {line}", file=sys.stderr))
    warn_of_threads(params.n_threads, params.n_threads_batch)
    for options in (params.context, params.speculative):
        for name in ("n_threads", "n_threads_batch"):
            if (n := getattr(options, name)) is not None:
                setattr(options, name, min(n, limit))
    return params


def warn_of_threads(*counts: int) -> None:
    """Say on standard error that more threads than CPUs wait for each other most of the time."""
    from ikpy.machine.threads import hardware_threads

    if (most := max(counts)) > (n := hardware_threads()):
        print(f"warning: {most} threads on {n} CPUs wait for each other; -t {n} is faster", file=sys.stderr)


def print_devices() -> None:
    """Print the devices of this machine on standard output."""
    from ikpy.backends.cuda.devices import available

    print("Available devices:", *(f"  {device.name}: {device.description}" for device in available()), sep="\n")


def place_on_nodes(mode: str | None) -> int:
    """Does what --numa says, with lines on standard error; returns the largest number of threads that it leaves."""
    from ikpy.machine import numa, threads

    if mode is None:
        if line := numa.advice():
            print(line, file=sys.stderr)
        return MAX_THREADS
    numa.apply(mode, lambda line: print(line, file=sys.stderr))
    # Threads wait for each other actively: more of them than CPUs only get in each other's way.
    return threads.hardware_threads() if mode == "isolate" else MAX_THREADS
