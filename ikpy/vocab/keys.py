"""Typed access to the GGUF keys of a tokenizer: a value of another type is an error that names the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError


def text(metadata: Mapping[str, Any], key: str, default: str = "") -> str:
    """A string; FileFormatError for anything else."""
    value = metadata.get(key)
    if value is None:
        return default
    return value if isinstance(value, str) else _refuse(key, "a string")


def integer(metadata: Mapping[str, Any], key: str) -> int | None:
    """An integer, None if the key is absent; FileFormatError for anything else."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        _refuse(key, "an integer")
    return int(value)


def flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A bool, also written as a number; FileFormatError for anything else."""
    value = metadata.get(key)
    if value is None:
        return default
    return bool(value) if isinstance(value, bool | int | np.bool_ | np.integer) else _refuse(key, "a bool")


def texts(metadata: Mapping[str, Any], key: str) -> list[str] | None:
    """An array of strings, None if the key is absent; FileFormatError for anything else."""
    value = metadata.get(key)
    if value is None:
        return None
    items: list[Any] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [None]
    return items if all(isinstance(item, str) for item in items) else _refuse(key, "an array of strings")


def numbers(metadata: Mapping[str, Any], key: str) -> NDArray[Any] | None:
    """An array of numbers [n], None if the key is absent; FileFormatError for anything else."""
    value = metadata.get(key)
    if value is None:
        return None
    array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iufb":
        _refuse(key, "an array of numbers")
    return array


def _refuse(key: str, wanted: str) -> Any:
    raise FileFormatError(f"key {key} has the wrong type: expected {wanted}")
