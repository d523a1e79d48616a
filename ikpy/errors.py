"""Errors that are shown to the user as one line, with exit status 1 and no traceback."""

from __future__ import annotations

from collections.abc import Iterable


class IkpyError(Exception):
    """Base of every error a user can cause; the message says what, where and what to do."""


class FileFormatError(IkpyError):
    """A file is malformed, truncated or inconsistent."""


class UnsupportedError(IkpyError):
    """The input is valid but this version (or this machine) cannot handle it."""


class UsageError(IkpyError):
    """An option or argument is wrong or contradicts another one."""


class ResourceError(IkpyError):
    """Memory, disk or a device is missing or too small."""


class OutOfMemoryError(ResourceError):
    """Memory is too small now; it may be large enough when others have released theirs."""


_LONGEST_LINE, _KEPT_END = 1000, 300


def printable(text: str) -> str:
    """The text on one line, with control characters as escapes: names from files shall not steer a terminal.

    Of more than 1000 characters (damaged files have names of 64 KiB) the middle is left out.
    """
    line = escaped(" ".join(text.split()))
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE - _KEPT_END - 5]} ... {line[-_KEPT_END:]}"


def similar_names(name: str, known: Iterable[str]) -> str:
    """`; similar: ...`, the names that one may be a slip of, for the end of an error; empty if there is none."""
    from difflib import get_close_matches  # only errors need it

    found = get_close_matches(name[:64], list(known), 5)
    return f"; similar: {', '.join(found)}" if found else ""


def escaped(text: str) -> str:
    """The text with control characters as escapes, ends of lines included."""
    return "".join(c if ord(c) > 0x9F or " " <= c <= "~" else ascii(c)[1:-1] for c in text)
