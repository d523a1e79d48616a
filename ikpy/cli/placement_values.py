"""Conversion of the values of options that place tensors on devices; see `ikpy.cli.values`."""

from __future__ import annotations

import re

from ikpy.cli.values import Warn, bounded, to_float, to_int
from ikpy.errors import UsageError
from ikpy.quants.name_pattern import compile_pattern
from ikpy.quants.recipe import rule_items

MAX_FFN_BLOCKS = 1024


ALL_LAYERS = 999


def to_gpu_layers(text: str, warn: Warn) -> int:
    """Number of layers; `auto` stands for the default, `all` for more than any model has."""
    words = {"auto": -1, "all": ALL_LAYERS}
    return words[text.lower()] if text.lower() in words else to_int(text, warn)


def to_cpu_ffn(text: str, warn: Warn) -> list[tuple[str, str]]:
    """Number of layers, as the rule of -ot that keeps their dense feed-forward tensors on the CPU."""
    n = bounded(0)(text, warn)
    blocks = "|".join(map(str, range(min(n, MAX_FFN_BLOCKS))))
    return [(rf"^blk\.(?:{blocks})\.ffn_(?:up|down|gate)\.(?:weight|scale)$", "CPU")] if n else []


def to_tensor_override(text: str, warn: Warn) -> list[tuple[str, str]]:
    """`REGEX=BUFFER[,REGEX=BUFFER...]`, split at commas outside of brackets, then at the first `=` of each item.

    Blanks and newlines around items and empty items are left out.
    """
    rules = []
    for item in rule_items(text):
        pattern, equals, buffer = item.partition("=")
        if not (pattern and equals and buffer):
            raise UsageError(f"Invalid tensor buffer type override: {text} (expected REGEX=BUFFER)")
        try:
            compile_pattern(pattern)
        except re.error as error:
            raise UsageError(f"Invalid tensor buffer type override: {text} (regex {pattern!r}: {error})") from error
        rules.append((pattern, buffer))
    return rules


def to_tensor_split(text: str, warn: Warn) -> tuple[float, ...]:
    """Shares of devices, separated by commas, slashes or semicolons."""
    shares = tuple(to_float(part, warn) for part in re.split("[,/;]", text))
    if any(share < 0 for share in shares):
        raise ValueError(f"shares cannot be negative, got {text!r}")
    return shares


def _device_name(text: str) -> str:
    """As devices are called: names of hosts keep their case."""
    name = text.strip()
    return f"RPC[{name[4:]}" if name.upper().startswith("RPC[") else name.upper()


def to_devices(text: str, warn: Warn) -> tuple[str, ...]:
    """Names of devices separated by commas; `none` for no device."""
    return () if text.lower() == "none" else tuple(map(_device_name, filter(str.strip, text.split(","))))


def to_hosts(text: str, warn: Warn) -> tuple[str, ...]:
    """`HOST:PORT[,HOST:PORT...]`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def to_fit_margins(text: str, warn: Warn) -> dict[int, int]:
    """`ID,MiB[,ID,MiB...]`: device number to MiB."""
    numbers = [to_int(part, warn) for part in text.split(",")]
    if len(numbers) % 2:
        raise ValueError(f"expected ID,MiB,... in pairs, got {text!r}")
    return dict(zip(numbers[::2], numbers[1::2], strict=True))


def to_fit_targets(text: str, warn: Warn) -> list[int]:
    """`MiB[,MiB...]`: one number for all devices, or one for each."""
    return [bounded(0)(part, warn) for part in text.split(",")]


CUDA_PARAMETERS = ("graphs", "offload-batch-size", "bf16-batch-size", "wgmma")
OTHER_CUDA_PARAMETERS = ("fusion", "offload-batch-size-per-byte", "mmq-id-size", "enable-p2p", "fa-offset")


def to_cuda_params(text: str, warn: Warn) -> dict[str, int]:
    """`K=V[,K=V...]`; unknown and malformed entries are ignored with a warning."""
    found = {}
    for entry in filter(None, text.split(",")):
        key, _, value = entry.partition("=")
        if key in CUDA_PARAMETERS and value.isdigit():
            found[key] = int(value)
        elif key in OTHER_CUDA_PARAMETERS:
            warn(f"{key} has no effect")
        else:
            warn(f"invalid parameter {entry} -> ignored")
    return found


def to_offload_policy(text: str, warn: Warn) -> list[tuple[int, bool]]:
    """`op,0|1[,op,0|1...]`."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or len(values) % 2:
        raise UsageError(f"Invalid offload policy argument: {text} (expected op,0|1[,op,0|1...])")
    return [(op, bool(on)) for op, on in zip(values[::2], values[1::2], strict=True)]
