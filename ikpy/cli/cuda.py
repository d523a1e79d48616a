"""`ikpy cuda`: devices, and kernels compiled ahead of time."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ikpy.cli.parser import HELP_NAMES
from ikpy.errors import IkpyError, UsageError

USAGE = """usage: ikpy cuda info
       ikpy cuda build [--arch sm_XX[,sm_YY...]|all] [--jobs N] [--force] [--usage] [--no-spills]
       ikpy cuda tune
       ikpy cuda check [-m MODEL] [options of cli]

info   show the devices and what the CUDA backend needs
build  compile the kernels into the user cache, for the devices found unless --arch names architectures (compute_80,
       compute_75: PTX, which drivers compile for devices that this nvcc does not know);
       --jobs N compiles N files at a time (default: one per core), --force also those that are in the cache,
       --usage prints registers, shared memory and spills of every kernel, --no-spills makes a spill an error
tune   time products of every family of weight types on the devices found: int8, bf16 and, on sm_90, wgmma kernels;
       models that are loaded later use what was fastest
check  run a short prompt and one token node by node on the devices and again on the CPU from the same inputs, and
       print the largest difference per op and type; status 1 if one is above 2 % of the result's magnitude"""

TOLERANCE = 0.02


def run(arguments: Sequence[str]) -> int:
    """Run a subcommand; returns the exit status."""
    if not arguments or arguments[0] in HELP_NAMES:
        print(USAGE)
        return 0
    command, rest = arguments[0], list(arguments[1:])
    if command != "check" and rest[:1] in (["-h"], ["--help"]):  # --usage is an option of build
        print(USAGE)
        return 0
    if command == "info" and not rest:
        return info()
    if command == "build":
        return build(rest)
    if command == "tune" and not rest:
        return tune()
    if command == "check":
        return check(rest)
    wrong = rest[0] if command in ("info", "tune") else command
    raise UsageError(f"unknown argument: {wrong} (ikpy cuda info, build, tune and check exist)")


def info() -> int:
    """Print devices, compiler and cache."""
    from ikpy.backends.cuda import devices, modules, ways

    found = devices.available()
    for device in found:
        memory = device.memory_estimate()
        major, minor = device.compute_capability
        print(
            f"{device.name}: {device.description}, compute capability {major}.{minor}, "
            f"{memory.free / 2**20:.0f} of {memory.total / 2**20:.0f} MiB free"
        )
        print(f"  prompts: {ways.known(device)}")
    if not found:
        print(f"no devices: {devices.why_none()}")
    print(f"compiler: {_compiler()}")
    folder = modules.cache_dir()
    print(f"kernel cache: {folder} ({len([*folder.glob('*/*.cubin'), *folder.glob('*/*.ptx')])} files)")
    return 0


def _compiler() -> str:
    from ikpy.backends.cuda import modules

    try:
        return f"{modules.nvcc()} ({modules.nvcc_version()})"
    except IkpyError as error:
        return str(error)


def build(arguments: Sequence[str]) -> int:
    """Compile the kernels."""
    from ikpy.backends.cuda import modules

    options = _build_options(arguments)
    architectures = options["--arch"].split(",") if options["--arch"] else _device_architectures()
    if architectures == ["all"]:
        architectures = [*modules.ARCHITECTURES, *modules.VIRTUAL]
    spilled = False
    for arch in architectures:
        if not arch.startswith("sm_") and arch not in modules.VIRTUAL:
            raise UsageError(f"--arch {arch}: expected sm_XX, such as sm_86, {', '.join(modules.VIRTUAL)}, or all")
        jobs = int(options["--jobs"]) if options["--jobs"] else None
        cubins = modules.build(arch, _progress, jobs=jobs, force=bool(options["--force"]))
        print(f"{arch}: {len(cubins)} files in {modules.cache_dir() / arch}")
        if options["--usage"]:
            for cubin in cubins:
                print(f"--- {cubin.source.name}\n{cubin.usage.rstrip()}")
        for line in modules.spills(cubins):
            spilled = True
            print(f"{arch}: spills: {line}")
    return int(spilled and bool(options["--no-spills"]))


def tune() -> int:
    """Measure which kernels are fastest."""
    from ikpy.backends.cuda import devices
    from ikpy.backends.cuda.tune import tune as measure

    found = devices.available()
    if not found:
        raise UsageError(f"ikpy cuda tune: no devices: {devices.why_none()}")
    for device in found:
        print(f"kept in {measure(device, print).path}")
    return 0


def check(arguments: Sequence[str]) -> int:
    """Compare the devices with the CPU, node by node."""
    from ikpy.cli.session import load
    from ikpy.cli.start import start

    params = start("cli", ["--no-warmup", *arguments], "Compare devices with the CPU, node by node.", "cuda check")
    if params is None:
        return 0
    context = load(params).new_context()
    if context.devices is None:
        from ikpy.backends.cuda import devices

        reason = "-ngl is 0 or -dev none" if devices.available() else devices.why_none()
        raise UsageError(f"ikpy cuda check: no node runs on a device: {reason}")
    worst: dict[tuple[str, str, str], tuple[int, float, str]] = {}
    for error in context.compare_devices():
        key = error.device, error.kind, error.types
        count, largest, what = worst.get(key, (0, -1.0, ""))
        worst[key] = (count + 1, *((error.error, error.what) if error.error > largest else (largest, what)))
    print(f"{'device':<8} {'op':<24} {'types':<24} {'nodes':>6} {'error':>9}  worst")
    for (device, kind, types), (count, largest, what) in sorted(worst.items()):
        mark = "  <-- WRONG" if largest > TOLERANCE else ""
        print(f"{device:<8} {kind:<24} {types:<24} {count:>6} {largest:9.1e}  {what}{mark}")
    return int(any(largest > TOLERANCE for _, largest, _ in worst.values()))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _device_architectures() -> list[str]:
    from ikpy.backends.cuda import devices, modules

    found = sorted({modules.architecture(device.compute_capability) for device in devices.available()})
    if not found:
        raise UsageError(f"ikpy cuda build: name the architectures with --arch, no devices: {devices.why_none()}")
    return found


def _build_options(arguments: Sequence[str]) -> dict[str, str]:
    options = {"--arch": "", "--jobs": "", "--force": "", "--usage": "", "--no-spills": ""}
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if name not in options:
            raise UsageError(f"unknown argument: {name} (of ikpy cuda build)")
        if name in ("--force", "--usage", "--no-spills"):
            options[name] = "1"
        elif not rest:
            raise UsageError(f"ikpy cuda build: {name} needs a value")
        else:
            options[name] = rest.pop(0)
    if options["--jobs"] and not options["--jobs"].isdecimal():
        raise UsageError(f"--jobs {options['--jobs']}: expected a number")
    return options
