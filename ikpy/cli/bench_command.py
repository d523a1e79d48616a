"""The command line of `ikpy bench`. A bare switch such as `-fa` is accepted when another option is next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ikpy.cli.bench_options import BY_NAME, SOURCES, BenchOption
from ikpy.cli.options import NO_GPU, normalize_name
from ikpy.cli.parser import HELP_NAMES, has_devices, suggest
from ikpy.cli.values import in_range
from ikpy.errors import IkpyError, UsageError
from ikpy.tools.bench_tests import BenchParams


@dataclass
class BenchCommand:
    """Parsed command line; `action` is run or help."""

    values: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    action: str = "run"

    def params(self, default_model: Callable[[], str]) -> BenchParams:
        """Parameters with defaults filled in."""
        from ikpy.machine.threads import physical_cores

        cores = physical_cores()
        given = {"threads": [(cores, cores)], **self.values}
        for name in SOURCES:
            given.pop(name, None)
        if not given.get("models"):
            given["models"] = [default_model()]
        if given.get("devices") and not (given.get("hosts") or has_devices()):
            given["devices"] = ()
        return BenchParams(**given)


def parse_bench(arguments: Sequence[str]) -> BenchCommand:
    """Read the argument list.

    Raises:
        UsageError: unknown option, missing or bad value.
    """
    command = BenchCommand()
    has_hosts = "--rpc" in map(normalize_name, arguments) or "-rpc" in arguments
    position = 0
    while position < len(arguments):
        spelled = arguments[position]
        name = normalize_name(spelled)
        position += 1
        if name in HELP_NAMES:
            command.action = "help"
            return command
        option = BY_NAME.get(name)
        if option is None:
            raise UsageError(f"invalid parameter for argument: {spelled}{suggest(name, BY_NAME)}")
        following = arguments[position] if position < len(arguments) else None
        if option.flag or (option.switch and (following is None or following.startswith("-"))):
            text = "1"
        elif following is None:
            raise UsageError(f"invalid parameter for argument: {spelled} (a value is missing)")
        else:
            text = following
            position += 1
        take(command, option, spelled, text, has_gpus=has_hosts or has_devices())
    return command


def take(command: BenchCommand, option: BenchOption, spelled: str, text: str, *, has_gpus: bool) -> None:
    """Convert and store one use of an option. has_gpus: options for GPUs mean something."""

    def warn(message: str) -> None:
        command.warnings.append(f"{spelled}: {message}")

    parts = text.split(option.separator) if option.separator else [text]
    if not option.many and len(parts) > 1:
        warn(f"takes one value, using {parts[0]}")
        parts = parts[:1]
    try:
        if option.ranges:
            parts = [number for part in parts for number in in_range(part)]
        converted = [option.convert(part, warn) for part in parts]
    except (ValueError, IkpyError) as error:
        raise UsageError(f"invalid parameter for argument: {spelled} ({error})") from error
    without_effect = option.no_effect and not (option.no_effect == NO_GPU and has_gpus)
    if without_effect and any(value != option.idle for value in converted):
        command.warnings.append(f"no effect: {spelled} ({option.no_effect})")
    if option.dest == "tensor_split" and len(parts) > 1 and max(map(len, converted)) == 1:
        warn(f"{len(parts)} tests with one share each; the shares of a test have slashes between: {'/'.join(parts)}")
    if not option.dest:
        return
    if option.dest == "override_tensor":
        command.values[option.dest] = ";".join(filter(None, [command.values.get(option.dest), str(converted[0])]))
    elif option.many:
        command.values.setdefault(option.dest, []).extend(converted)
    else:
        command.values[option.dest] = converted[0]
