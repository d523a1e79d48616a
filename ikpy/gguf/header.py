"""Parsing of one GGUF file's header: bounded by the file size, nothing decoded that is not needed.

Layout: magic, version u32, tensor count u64, key count u64, keys and values,
tensor table, padding to the alignment, data. All numbers are little endian.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.gguf.strings import StringArrayError, index_strings
from ikpy.gguf.types import (
    DEFAULT_ALIGNMENT,
    DTYPES,
    KEY_ALIGNMENT,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_ARRAY_STRINGS,
    MAX_DIMS,
    MAX_NAME_BYTES,
    MAX_TENSOR_NAME_BYTES,
    READ_VERSIONS,
    GGUFValueType,
    align_up,
)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_FIXED_HEADER_BYTES = 24
# An empty key with a one-byte value; an empty name without dimensions.
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_MAX_ELEMENTS = (1 << 63) - 1
_GIVE_GGUF = "give the path of a .gguf model file"
_BROKEN = "the file is truncated or damaged; download or convert it again"


@dataclass(frozen=True)
class MetadataEntry:
    """Place of one metadata value in the file.

    `offset` and `nbytes` span the stored value without key and type (for arrays: without element type and
    count; for strings: without the length). `count` is the number of elements, 1 for scalars.
    `starts` is the index of a string array, see `index_strings`.
    """

    type: GGUFValueType
    element_type: GGUFValueType | None
    offset: int
    nbytes: int
    count: int
    starts: np.ndarray | None = None


@dataclass(frozen=True)
class TensorRecord:
    """One row of the tensor table as stored; `offset` is relative to the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass
class Header:
    """Everything in front of the tensor data of one file."""

    version: int
    entries: dict[str, MetadataEntry] = field(default_factory=dict)
    tensors: list[TensorRecord] = field(default_factory=list)
    alignment: int = DEFAULT_ALIGNMENT
    data_offset: int = 0


class _Cursor:
    """Reads forward through the file and refuses to pass its end."""

    def __init__(self, data: np.ndarray, path: str):
        self.data = data
        self.buffer = data.data
        self.path = path
        self.position = 0

    def fail(self, problem: str, advice: str = _BROKEN) -> NoReturn:
        raise FileFormatError(f"{self.path}: {problem}; {advice}")

    @property
    def remaining(self) -> int:
        return len(self.buffer) - self.position

    def take(self, nbytes: int, what: str) -> int:
        """Advance over `nbytes`; returns the offset where they start."""
        if nbytes > self.remaining:
            self.fail(f"{what} needs {nbytes} bytes at offset {self.position}, only {self.remaining} are left")
        start = self.position
        self.position += nbytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def name(self, what: str, most: int = MAX_NAME_BYTES) -> str:
        """A length-prefixed string that must be non-empty UTF-8 of at most so many bytes."""
        length = self.u64(f"length of {what}")
        start = self.take(length, what)
        if length == 0:
            self.fail(f"{what} is empty")
        if length > most:
            self.fail(f"{what} has {length} bytes, more than the {most} allowed")
        try:
            return str(self.buffer[start : start + length], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} at offset {start} is not valid UTF-8")


def parse_header(data: np.ndarray, path: str) -> Header:
    """Parse the header of a mapped file.

    Args:
        data: uint8, the whole file. path: its name, for messages.
    Raises:
        FileFormatError: anything malformed. UnsupportedError: big-endian or version 1 files.
    """
    cursor = _Cursor(data, path)
    header, tensor_count, entry_count = _fixed_part(cursor)
    for number in range(entry_count):
        _read_entry(cursor, header, number)
    header.alignment = _alignment(cursor, header)
    names = set()
    for number in range(tensor_count):
        record = _read_tensor(cursor, number, header.alignment)
        if record.name in names:
            raise FileFormatError(f"{path}: invalid model: tensor {record.name!r} is duplicated; {_BROKEN}")
        names.add(record.name)
        header.tensors.append(record)
    header.data_offset = align_up(cursor.position, header.alignment)
    return header


def _fixed_part(cursor: _Cursor) -> tuple[Header, int, int]:
    if cursor.remaining < _FIXED_HEADER_BYTES:
        cursor.fail(f"not a GGUF file: only {cursor.remaining} bytes long")
    magic = bytes(cursor.buffer[:4])
    if magic != MAGIC:
        cursor.fail(*_wrong_magic(bytes(cursor.buffer[:24])))
    cursor.position = 4
    version = cursor.u32("version")
    if version not in READ_VERSIONS:
        _refuse_version(version, cursor.path)
    tensor_count = cursor.u64("tensor count")
    entry_count = cursor.u64("metadata count")
    if tensor_count * _MIN_TENSOR_BYTES + entry_count * _MIN_ENTRY_BYTES > cursor.remaining:
        cursor.fail(
            f"header announces {tensor_count} tensors and {entry_count} metadata keys, "
            f"more than a file of {len(cursor.buffer)} bytes can hold"
        )
    return Header(version), tensor_count, entry_count


_OTHER_KINDS = (
    (rb"version https://git-lfs", "this is a Git LFS pointer, not the model itself", "git lfs pull fetches it"),
    (rb"lmgg|tjgg|fmgg|algg", "this is a GGML file from before GGUF, which is no longer supported", _GIVE_GGUF),
    (rb".{4}\x00{4}\s*\{", "not a GGUF file but safetensors", "ikpy convert makes a GGUF file of the folder it is in"),
    (
        rb".{5}\x00{3}(blk\.|output|token_embd)",
        "no model but an importance matrix",
        "ikpy quantize takes it with --imatrix",
    ),
    (rb"PK\x03\x04", "not a GGUF file but a checkpoint of PyTorch or a zip archive", _GIVE_GGUF),
    (rb"\s*<(!doctype|html)", "not a GGUF file but a web page", "check the address that it was downloaded from"),
    (rb"\x00{24}", "not a GGUF file: it begins with zeros", "its download may be unfinished"),
)
"""First bytes of files that are given as models, what they are, and what helps."""


def _wrong_magic(start: bytes) -> tuple[str, str]:
    """What a file with other first bytes than a GGUF file's is, and what to do."""
    for pattern, kind, advice in _OTHER_KINDS:
        if re.match(pattern, start, re.DOTALL | re.IGNORECASE):
            return kind, advice
    return f"not a GGUF file: it starts with {start[:4]!r}", _GIVE_GGUF


def _refuse_version(version: int, path: str) -> NoReturn:
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{path}: big-endian GGUF files are not supported; gguf-convert-endian FILE little (Python package gguf) "
            "converts it in place"
        )
    if version == 1:
        raise UnsupportedError(f"{path}: GGUF version 1 is no longer supported; convert the model again")
    known = " and ".join(str(v) for v in READ_VERSIONS)
    raise UnsupportedError(f"{path}: GGUF version {version} is not supported, only {known}; update ikpy")


def _value_type(cursor: _Cursor, what: str) -> GGUFValueType:
    number = cursor.u32(f"type of {what}")
    try:
        return GGUFValueType(number)
    except ValueError:
        cursor.fail(f"{what} has unknown value type {number}")


def _read_entry(cursor: _Cursor, header: Header, number: int) -> None:
    key = cursor.name(f"metadata key {number}")
    if key in header.entries:
        cursor.fail(f"metadata key {key!r} appears twice")
    what = f"metadata key {key!r}"
    value_type = _value_type(cursor, what)
    if value_type is GGUFValueType.ARRAY:
        header.entries[key] = _array_entry(cursor, what)
        return
    nbytes = cursor.u64(f"length of {what}") if value_type is GGUFValueType.STRING else DTYPES[value_type].itemsize
    offset = cursor.take(nbytes, what)
    if value_type is GGUFValueType.BOOL and cursor.buffer[offset] > 1:
        cursor.fail(f"{what} is a bool of value {cursor.buffer[offset]}")
    header.entries[key] = MetadataEntry(value_type, None, offset, nbytes, 1)


def _array_entry(cursor: _Cursor, what: str) -> MetadataEntry:
    element = _value_type(cursor, f"elements of {what}")
    if element is GGUFValueType.ARRAY:
        cursor.fail(f"{what} is an array of arrays, which GGUF files may not hold")
    count = cursor.u64(f"length of {what}")
    if element is GGUFValueType.STRING:
        return _string_array_entry(cursor, what, count)
    nbytes = count * DTYPES[element].itemsize
    offset = cursor.take(nbytes, what)
    if element is GGUFValueType.BOOL and nbytes and int(cursor.data[offset : offset + nbytes].max()) > 1:
        cursor.fail(f"{what} holds bools other than 0 and 1")
    return MetadataEntry(GGUFValueType.ARRAY, element, offset, nbytes, count)


def _string_array_entry(cursor: _Cursor, what: str, count: int) -> MetadataEntry:
    if count > MAX_ARRAY_STRINGS:
        cursor.fail(f"{what} announces {count} strings, more than the {MAX_ARRAY_STRINGS} allowed")
    start = cursor.position
    try:
        starts = index_strings(cursor.data, start, count)
    except StringArrayError as error:
        cursor.fail(f"string {error.index} of {count} in {what} runs past the end of the file")
    cursor.position = int(starts[-1])
    return MetadataEntry(GGUFValueType.ARRAY, GGUFValueType.STRING, start, cursor.position - start, count, starts)


def _alignment(cursor: _Cursor, header: Header) -> int:
    entry = header.entries.get(KEY_ALIGNMENT)
    if entry is None:
        return DEFAULT_ALIGNMENT
    if entry.type is not GGUFValueType.UINT32:
        cursor.fail(f"key {KEY_ALIGNMENT} has wrong type {entry.type.label} but expected type u32")
    alignment = int(_U32.unpack_from(cursor.buffer, entry.offset)[0])
    if alignment == 0 or alignment & (alignment - 1):
        cursor.fail(f"{KEY_ALIGNMENT} is {alignment}, not a power of two")
    if alignment > MAX_ALIGNMENT:
        cursor.fail(f"{KEY_ALIGNMENT} is {alignment}, more than the {MAX_ALIGNMENT} allowed")
    return alignment


def _read_tensor(cursor: _Cursor, number: int, alignment: int) -> TensorRecord:
    name = cursor.name(f"name of tensor {number}", MAX_TENSOR_NAME_BYTES)
    what = f"tensor {name!r}"
    dims = cursor.u32(f"dimension count of {what}")
    if dims > MAX_DIMS:
        cursor.fail(f"{what} has {dims} dimensions, more than the {MAX_DIMS} allowed")
    shape = tuple(cursor.u64(f"shape of {what}") for _ in range(dims)) or (1,)
    if 0 in shape or math.prod(shape) > _MAX_ELEMENTS:
        cursor.fail(f"{what} has an impossible shape {list(shape)}")
    type_id = cursor.u32(f"type of {what}")
    offset = cursor.u64(f"offset of {what}")
    if offset % alignment:
        cursor.fail(f"{what} starts at offset {offset}, not a multiple of the alignment {alignment}")
    return TensorRecord(name, shape, type_id, offset)
