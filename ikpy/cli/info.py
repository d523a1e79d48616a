"""`ikpy info`: version, build and machine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from types import ModuleType

from ikpy.cli.parser import HELP_NAMES
from ikpy.errors import UsageError


def run(arguments: Sequence[str]) -> int:
    """Print one fact per line; returns the exit status."""
    if arguments and arguments[0] in HELP_NAMES:
        print("usage: ikpy info\n\nShow version, build, native core and machine.")
        return 0
    if arguments:
        raise UsageError(f"unknown argument: {arguments[0]} (info takes none)")
    for name, value in facts():
        print(f"{name:<16} {value}")
    print(system_info())
    return 0


MAKERS = {"amd": "CPUs of AMD", "intel": "CPUs of Intel"}
GATHERS = {
    True: "slow, replaced where permutations or loads are faster (IKPY_GATHERS=fast or slow selects)",
    False: "fast (IKPY_GATHERS=fast or slow selects)",
}
FETCHES = {
    True: "from eight pages in turn (IKPY_FETCH=pages or lines selects)",
    False: "line after line (IKPY_FETCH=pages or lines selects)",
}
PERMUTES_USE = "VBMI and GFNI, used for few tokens (IKPY_VBMI=0 turns it off)"


def facts() -> list[tuple[str, str]]:
    """Name and value of every line."""
    import numpy
    import psutil

    from ikpy import __version__
    from ikpy._native import available_tiers, core, cpu, tier
    from ikpy.backends.cuda.devices import available, why_none
    from ikpy.machine.threads import hardware_threads, physical_cores
    from ikpy.tools import machine

    build = core.build_info()
    memory = psutil.virtual_memory()
    present = [name for name, there in cpu.features().items() if there]
    return [
        ("ikpy", __version__),
        ("python", f"{platform.python_version()} ({platform.python_implementation()}), numpy {numpy.__version__}"),
        ("platform", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("cpu", machine.cpu_name()),
        ("cpu features", " ".join(present) or "baseline"),
        ("native core", f"{tier} (available: {', '.join(available_tiers)}; IKPY_ISA selects)"),
        ("tile unit", tile_unit(core)),
        ("byte permutes", PERMUTES_USE if core.has_byte_permutes() else "none in use"),
        ("kernels for", f"{MAKERS[core.cpu_maker()]} (IKPY_MAKER=amd or intel selects)"),
        ("gathers", GATHERS[core.has_slow_gathers()]),
        ("weights fetched", FETCHES[core.fetches_from_pages()]),
        ("compiler", str(build["compiler"])),
        ("openmp", str(build["openmp"])),
        ("build flags", str(build["flags"])),
        ("devices", ", ".join(map(str, available())) or f"none: {why_none()}"),
        ("threads", f"{physical_cores()} physical cores, {hardware_threads()} hardware threads"),
        (
            "memory",
            f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available{memory_limit(memory.total)}",
        ),
    ]


def memory_limit(total: int) -> str:
    """What a container or control group leaves of that many bytes, if it is less."""
    from ikpy.machine.memory import machine_memory

    usable = machine_memory(swap=False)
    return f"; the container or control group may use {usable / 2**30:.1f} GiB" if usable < total else ""


def tile_unit(core: ModuleType) -> str:
    """What the native core uses of the CPU's tile unit."""
    if not core.has_tiles():
        return "none in use"
    if core.rounds_f16_activations():
        return "AMX bf16 and fp16, used for prompts, F16 weights included (IKPY_AMX=0 turns it off)"
    if core.has_half_tiles():
        return "AMX bf16 and fp16, used for prompts (IKPY_AMX=0 turns it off; fp16: F16 weights, too)"
    return "AMX bf16, used for prompts (IKPY_AMX=0 turns it off)"


def system_info() -> str:
    """The system_info line with the default thread count."""
    from ikpy.machine.threads import hardware_threads, physical_cores
    from ikpy.tools.cpu_features import feature_flags
    from ikpy.tools.run_logs import system_info_line

    return system_info_line(physical_cores(), None, hardware_threads(), feature_flags())
