"""Small GGUF files made byte by byte, independent of the writer under test."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.shared import SHARED

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(value_type: int, content: object) -> bytes:
    if value_type == STR:
        return string(content)  # type: ignore[arg-type]
    return struct.pack("<" + _FORMATS[value_type], content)


def scalar(key: str | bytes, value_type: int, content: object) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value(value_type, content)


def array(key: str, element_type: int, items: list, count: int | None = None) -> bytes:
    head = string(key) + struct.pack("<IIQ", ARR, element_type, len(items) if count is None else count)
    return head + b"".join(value(element_type, item) for item in items)


def tensor(name: str | bytes, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


def build(
    entries: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    magic: bytes = b"GGUF",
    tensor_count: int | None = None,
    entry_count: int | None = None,
) -> bytes:
    header = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    header += b"".join(entries) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data


def sample(**changes: object) -> bytes:
    """A valid file: every value type, two tensors (f32 [8], q8_0 [32, 2])."""
    entries = [
        scalar("general.architecture", STR, "llama"),
        scalar("u8", U8, 200),
        scalar("i8", I8, -5),
        scalar("u16", U16, 60000),
        scalar("i16", I16, -30000),
        scalar("u32", U32, 4000000000),
        scalar("i32", I32, -2000000000),
        scalar("f32", F32, 0.5),
        scalar("bool", BOOL, 1),
        scalar("u64", U64, 2**63 + 1),
        scalar("i64", I64, -(2**62)),
        scalar("f64", F64, 0.1),
        array("words", STR, ["", "a", "Ġthe", "x" * 300, b"\xff\xfe", "nul\0inside", ""]),
        array("numbers", I32, [1, -2, 3]),
        array("halves", F32, [0.5, 1.5]),
        array("flags", BOOL, [1, 0, 1]),
        array("none", STR, []),
    ]
    tensors = [tensor("first", (8,), 0, 0), tensor("second", (32, 2), 8, 32)]
    data = bytes(range(32)) + bytes(range(100, 168)) + b"\0" * 28
    return build(entries, tensors, data, **changes)  # type: ignore[arg-type]


def shared_folder() -> Path:
    """Folder of models and captures next to the repository; skips the test if it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no folder {SHARED} with models (set IKPY_SHARED)")
    return SHARED
