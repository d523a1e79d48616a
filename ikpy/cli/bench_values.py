"""Texts of options of `ikpy bench` to values."""

from __future__ import annotations

from ikpy.cli import placement_values, values
from ikpy.cli.flags.loading import LOAD_MODES
from ikpy.cli.values import Warn

COUNT = values.bounded(0)


def to_overrides(text: str, warn: Warn) -> str:
    """Rules for tensors, which may also be separated by `;`, with `;` between them."""
    rules = placement_values.to_tensor_override(text.replace(";", ","), warn)
    return ";".join(f"{pattern}={buffer}" for pattern, buffer in rules)


def to_device_names(text: str, warn: Warn) -> tuple[str, ...]:
    """Names separated by `/` or `,`; `none` for no device."""
    return placement_values.to_devices(text.replace("/", ","), warn)


def to_pair(text: str, warn: Warn) -> tuple[int, int]:
    """`pp,tg`."""
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueError(f"expected two numbers such as 512,128, got {text!r}")
    return COUNT(parts[0], warn), COUNT(parts[1], warn)


def to_test(text: str, warn: Warn) -> tuple[int, int]:
    """`pp,tg` of which one is above 0."""
    pair = to_pair(text, warn)
    if pair == (0, 0):
        raise ValueError(f"no tokens to measure in {text!r}")
    return pair


def to_generation(text: str, warn: Warn) -> tuple[int, int]:
    """`pp,tg`, of which the time of `tg` is measured."""
    pair = to_pair(text, warn)
    if not pair[1]:
        raise ValueError(f"no tokens to generate in {text!r}")
    return pair


def to_threads_pair(text: str, warn: Warn) -> tuple[int, int]:
    """Thread counts for generation and for batches."""
    generation, batch = to_pair(text, warn)
    return values.to_threads(str(generation), warn), values.to_threads(str(batch), warn)


def to_thread_pair(text: str, warn: Warn) -> tuple[int, int]:
    """One thread count for generation and batches."""
    threads = values.to_threads(text, warn)
    return threads, threads


def to_off(text: str, warn: Warn) -> bool:
    """What an option stores that switches something off."""
    return False


def to_mapped(text: str, warn: Warn) -> bool:
    """Whether a mode of loading maps the file."""
    return values.choice(*LOAD_MODES)(text, warn) in ("auto", "mmap", "mmap+mlock")


def to_cuda_params(text: str, warn: Warn) -> str:
    """The text, with a warning for each entry that has no effect."""
    placement_values.to_cuda_params(text, warn)
    return text
