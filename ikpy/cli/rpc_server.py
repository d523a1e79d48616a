"""`ikpy rpc-server`: lend memory and processors of this machine to programs on others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ikpy.cli.parser import suggest
from ikpy.errors import UsageError

USAGE = """usage: ikpy rpc-server [options]

Lends memory and processors of this machine to a program on another one that is given --rpc HOST:PORT.

    -h, --help               print this help and exit
    -H ADDRESS, --host ADDRESS
                             address to listen at (default: 127.0.0.1, this machine alone)
    -p PORT, --port PORT     port to listen at (default: 50052)
    -m MiB, --mem MiB        memory to lend (default: nine tenths of what is free)
    -t N, --threads N        threads (default: number of physical cores)
    -c, --cache              keep weights on the disk, in $XDG_CACHE_HOME/ikpy/rpc
    -d CPU, --device CPU     what is lent; a host's GPUs are not
"""
VALUE_OPTIONS = {
    "-H": "host",
    "--host": "host",
    "-p": "port",
    "--port": "port",
    "-m": "mem",
    "--mem": "mem",
    "-t": "threads",
    "--threads": "threads",
    "-d": "device",
    "--device": "device",
}
FLAGS = {"-c": "cache", "--cache": "cache", "-h": "help", "--help": "help", "--verbose": "verbose"}
LIMITS = {"port": (0, 65535), "mem": (1, 1 << 30), "threads": (1, 512)}
MIB = 1 << 20
LOOPBACK = ("127.", "::1", "localhost")
WARNING = """\
warning: {address} can be reached from other machines. Whoever connects can use the memory and processors of
warning: this machine without a password, and everything crosses the network unencrypted: use it in a network
warning: that you trust, never on the open internet."""


@dataclass
class RpcOptions:
    """Values of the command line."""

    host: str = "127.0.0.1"
    port: int = 50052
    mem: int | None = None
    threads: int | None = None
    device: str = "CPU"
    cache: bool = False
    help: bool = False
    verbose: bool = False


def parse_options(arguments: Sequence[str]) -> RpcOptions:
    """Read the options.

    Raises:
        UsageError: unknown option, missing or bad value.
    """
    options = RpcOptions()
    rest = iter(arguments)
    for name in rest:
        if name in FLAGS:
            setattr(options, FLAGS[name], True)
        elif name in VALUE_OPTIONS:
            value = next(rest, None)
            if value is None:
                raise UsageError(f"{name}: a value is missing")
            field = VALUE_OPTIONS[name]
            setattr(options, field, _number(name, value, *LIMITS[field]) if field in LIMITS else value)
        else:
            raise UsageError(f"unknown option '{name}'{suggest(name, [*FLAGS, *VALUE_OPTIONS])}")
    if options.device.upper() not in ("CPU", "CPU0"):
        raise UsageError(f"-d {options.device}: a host lends its CPU; its GPUs are not lent")
    return options


def _number(name: str, text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise UsageError(f"{name} {text}: expected a number from {low} to {high}")
    return int(text)


def run(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status."""
    options = parse_options(arguments)
    if options.help:
        print(USAGE, end="")
        return 0
    from ikpy import _native
    from ikpy.backends.remote.host import Host, HostParams
    from ikpy.backends.remote.tensor_cache import TensorCache
    from ikpy.machine.memory import available_memory
    from ikpy.machine.threads import physical_cores

    cache = TensorCache.default().folder if options.cache else None
    limit = options.mem * MIB if options.mem else available_memory() * 9 // 10
    n_threads = options.threads or physical_cores()
    host = Host(HostParams(options.host, options.port, limit, n_threads, cache), _say)
    if not options.host.startswith(LOOPBACK):
        _say(WARNING.format(address=options.host))
    _say(f"rpc-server: lends {limit // MIB} MiB and {n_threads} threads ({_native.tier})")
    if cache:
        _say(f"rpc-server: keeps weights in {cache}")
    _say(f"rpc-server: listening at {options.host}:{host.port}")
    host.serve()
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
