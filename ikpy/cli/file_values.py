"""Conversion of the values of options that name files whose text is wanted; see `ikpy.cli.values`."""

from __future__ import annotations

from ikpy.cli.values import Warn
from ikpy.errors import UsageError
from ikpy.gguf.types import MAGIC

BYTE_ORDER_MARK = "\ufeff"
COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"PK\x03\x04": "unzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}
"""First bytes of compressed files, which texts are downloaded as -> the program that unpacks them."""


def read_bytes(path: str) -> bytes:
    """Content of a file named by an option.

    Raises:
        UsageError: the file cannot be read, or is a model, which may be larger than memory.
    """
    try:
        with open(path, "rb") as stream:
            start = stream.read(len(MAGIC))
            if start == MAGIC:
                raise UsageError(f"file '{path}' is a GGUF file, no text; a model is given with -m")
            return start + stream.read()
    except OSError as error:
        hint = " (standard input is called /dev/stdin)" if path == "-" else ""
        raise UsageError(f"failed to open file '{path}': {error.strerror}{hint}") from error


def to_file_text(text: str, warn: Warn) -> str:
    """Text of the named file; bytes that are not UTF-8 become surrogate escapes, as in command-line arguments.

    Raises:
        UsageError: the file cannot be read, or is compressed: its text would be noise.
    """
    content = read_bytes(text)
    program = next((name for start, name in COMPRESSED.items() if content.startswith(start)), None)
    if program is not None:
        raise UsageError(f"file '{text}' is compressed: unpack it first ({program} {text})")
    return content.decode("utf-8", "surrogateescape")


def to_code_file(text: str, warn: Warn) -> str:
    """Text of the named file without the mark that some editors put before UTF-8: it is no part of a grammar."""
    return to_file_text(text, warn).removeprefix(BYTE_ORDER_MARK)


def to_utf8_file(text: str, warn: Warn) -> str:
    """Text of the named file, which must be UTF-8, without a byte order mark."""
    try:
        return read_bytes(text).decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise UsageError(f"file '{text}' is not valid UTF-8: byte {error.start}") from error


def to_template_file(text: str, warn: Warn) -> str:
    """A chat template from a file that is not empty."""
    template = to_utf8_file(text, warn)
    if not template.strip():
        raise UsageError(f"file '{text}' holds no chat template")
    return template


def to_file_lines(text: str, warn: Warn) -> list[str]:
    """Lines of the named file that are not empty."""
    return [line for line in to_file_text(text, warn).splitlines() if line]


def to_prompt_file(text: str, warn: Warn) -> str:
    """Text of the named file without exactly one newline at its end."""
    return to_file_text(text, warn).removesuffix("\n")
