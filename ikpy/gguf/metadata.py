"""Metadata of a GGUF file as a read-only mapping whose values are decoded when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from ikpy.errors import FileFormatError
from ikpy.gguf.header import MetadataEntry
from ikpy.gguf.strings import StringArray
from ikpy.gguf.types import DTYPES, GGUFValueType, type_label

T = TypeVar("T")


def scalar_or(metadata: Mapping[str, Any], key: str, default: T) -> T:
    """Value of a key if it is of the default's type, else the default; a float stands for integers too.

    For what describes a model that was not checked: loading it names keys of wrong types.
    """
    value = metadata.get(key)
    fits = isinstance(value, (int, float) if isinstance(default, float) else type(default))
    return cast(T, value) if fits else default


def integers_or(metadata: Mapping[str, Any], key: str, default: int) -> list[int]:
    """The integers of an array, or an integer as the only one of a list, else the default; see `scalar_or`."""
    value = metadata.get(key)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value):
        return [int(item) for item in value]
    return [scalar_or(metadata, key, default)]


class Metadata(Mapping[str, Any]):
    """Key to value, in file order.

    Values: integers -> int, floats -> float, bool, strings -> str (invalid UTF-8 kept by "surrogateescape"),
    arrays of numbers -> read-only numpy array of the stored dtype (bool arrays: np.bool_), arrays of strings
    -> `StringArray`.
    """

    def __init__(self, data: np.ndarray, entries: dict[str, MetadataEntry], path: str):
        self._data = data
        self._entries = entries
        self._path = path
        self._decoded: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(self._entries[key])
        return self._decoded[key]

    def entry(self, key: str) -> MetadataEntry:
        """Place and type of a value; KeyError if the key is absent."""
        return self._entries[key]

    def stored(self, key: str) -> np.ndarray:
        """uint8 view of the value's stored bytes (see `MetadataEntry`)."""
        entry = self._entries[key]
        return self._data[entry.offset : entry.offset + entry.nbytes]

    def value_type(self, key: str) -> GGUFValueType:
        """Stored type of a value (`ARRAY` for every array); FileFormatError if the key is absent."""
        return self._existing(key).type

    def element_type(self, key: str) -> GGUFValueType | None:
        """Type of an array's elements, None for a scalar; FileFormatError if the key is absent."""
        return self._existing(key).element_type

    def require(
        self,
        key: str,
        expected: GGUFValueType | tuple[GGUFValueType, ...],
        element: GGUFValueType | None = None,
    ) -> Any:
        """Value of a key that must exist with (one of) the expected types; `element` checks an array's type.

        Raises:
            FileFormatError: "key not found in model: K" or "key K has wrong type X but expected type Y".
        """
        entry = self._existing(key)
        wanted = expected if isinstance(expected, tuple) else (expected,)
        if entry.type not in wanted or (element is not None and entry.element_type is not element):
            self._wrong_type(key, entry, wanted, element)
        return self[key]

    def _existing(self, key: str) -> MetadataEntry:
        entry = self._entries.get(key)
        if entry is None:
            raise FileFormatError(f"{self._path}: key not found in model: {key}")
        return entry

    def _wrong_type(
        self,
        key: str,
        entry: MetadataEntry,
        wanted: tuple[GGUFValueType, ...],
        element: GGUFValueType | None,
    ) -> NoReturn:
        expected = " or ".join(type_label(t, element if t is GGUFValueType.ARRAY else None) for t in wanted)
        found = type_label(entry.type, None if element is None else entry.element_type)
        raise FileFormatError(f"{self._path}: key {key} has wrong type {found} but expected type {expected}")

    def _decode(self, entry: MetadataEntry) -> Any:
        stored = self._data[entry.offset : entry.offset + entry.nbytes]
        if entry.type is GGUFValueType.STRING:
            return stored.tobytes().decode("utf-8", "surrogateescape")
        if entry.starts is not None:
            return StringArray(self._data, entry.starts)
        stored_type = entry.type if entry.element_type is None else entry.element_type
        # Values lie at any byte offset; the copy gives numpy aligned memory.
        values = np.frombuffer(stored.tobytes(), DTYPES[stored_type])
        if stored_type is GGUFValueType.BOOL:
            values = values.view(np.bool_)
        return values[0].item() if entry.element_type is None else values
