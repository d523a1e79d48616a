"""Encoding of metadata values, with range checks."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikpy.errors import UsageError
from ikpy.gguf.strings import StringArray
from ikpy.gguf.types import DTYPES, MAX_ARRAY_STRINGS, GGUFValueType, type_label

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def length_prefixed(text: str | bytes) -> bytes:
    """A string as stored: u64 byte count, then UTF-8 (lone surrogates give back the bytes they stand for)."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


@dataclass(frozen=True)
class StoredValue:
    """A metadata value ready to be written; `stored` has the layout of `MetadataEntry.nbytes`."""

    type: GGUFValueType
    element_type: GGUFValueType | None
    count: int
    stored: bytes

    def encode(self, key: str) -> bytes:
        """Key, type and value as they stand in the file."""
        parts = [length_prefixed(key), struct.pack("<I", self.type)]
        if self.element_type is not None:
            parts.append(struct.pack("<IQ", self.element_type, self.count))
        elif self.type is GGUFValueType.STRING:
            parts.append(struct.pack("<Q", len(self.stored)))
        return b"".join([*parts, self.stored])


def scalar(value_type: GGUFValueType, value: Any) -> StoredValue:
    """Encode a number, bool or string; UsageError if the type cannot hold the value."""
    if value_type is GGUFValueType.STRING:
        if not isinstance(value, str | bytes):
            raise _misfit(value, value_type)
        return StoredValue(value_type, None, 1, length_prefixed(value)[8:])
    if value_type is GGUFValueType.ARRAY:
        raise UsageError("an array needs an element type")
    _check_number(value_type, value)
    return StoredValue(value_type, None, 1, np.asarray(value, DTYPES[value_type]).tobytes())


def array(element_type: GGUFValueType, values: Iterable[Any]) -> StoredValue:
    """Encode an array of numbers, bools or strings; UsageError if the type cannot hold a value."""
    if element_type is GGUFValueType.ARRAY:
        raise UsageError("arrays of arrays cannot be stored in a GGUF file")
    if element_type is GGUFValueType.STRING:
        return _string_array(values)
    numbers = values if isinstance(values, np.ndarray) else list(values)
    dtype = DTYPES[element_type]
    if isinstance(numbers, np.ndarray):
        exact = dtype if element_type is not GGUFValueType.BOOL else np.dtype(np.bool_)
        if numbers.ndim != 1 or not np.can_cast(numbers.dtype, exact, "safe"):
            raise _misfit(f"array of {numbers.dtype}, {numbers.ndim}-d", type_label(GGUFValueType.ARRAY, element_type))
    else:
        for number in numbers:
            _check_number(element_type, number)
    stored = np.asarray(numbers, dtype)
    return StoredValue(GGUFValueType.ARRAY, element_type, stored.size, stored.tobytes())


def _string_array(values: Iterable[Any]) -> StoredValue:
    if isinstance(values, StringArray):
        count, stored = len(values), values.section().tobytes()
    else:
        items: Sequence[Any] = list(values)
        for item in items:
            if not isinstance(item, str | bytes):
                raise _misfit(item, GGUFValueType.STRING)
        count, stored = len(items), b"".join(map(length_prefixed, items))
    if count > MAX_ARRAY_STRINGS:
        raise UsageError(f"an array of {count} strings is longer than the {MAX_ARRAY_STRINGS} allowed")
    return StoredValue(GGUFValueType.ARRAY, GGUFValueType.STRING, count, stored)


def _check_number(value_type: GGUFValueType, value: Any) -> None:
    fits: bool | np.bool_
    if value_type is GGUFValueType.BOOL:
        fits = isinstance(value, bool | np.bool_)
    elif isinstance(value, bool | np.bool_):
        fits = False
    elif value_type.holds_integers:
        limits = np.iinfo(DTYPES[value_type])
        fits = isinstance(value, int | np.integer) and int(limits.min) <= value <= int(limits.max)
    else:
        fits = isinstance(value, int | float | np.integer | np.floating) and _is_within_floats(value_type, value)
    if not fits:
        raise _misfit(value, value_type)


def _is_within_floats(value_type: GGUFValueType, value: Any) -> bool:
    try:
        number = float(value)
    except OverflowError:  # integers have no limit
        return False
    return value_type is GGUFValueType.FLOAT64 or not math.isfinite(number) or abs(number) <= _FLOAT32_MAX


def _misfit(value: Any, wanted: GGUFValueType | str) -> UsageError:
    label = wanted.label if isinstance(wanted, GGUFValueType) else wanted
    return UsageError(f"value {value!r} does not fit type {label}")
