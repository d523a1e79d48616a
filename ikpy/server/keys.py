"""API keys: read from options and files, compared in constant time, named in logs."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path

from ikpy.errors import UsageError

SHOWN = 4
"""Characters of a key in the log."""


def read_keys(keys: Iterable[str], files: Iterable[str]) -> dict[str, str]:
    """Name of every key. A line of a file is a key, or a name and a key; others are named by their number.

    Raises UsageError for a file that cannot be read or has other lines, and when files are given but no key at all:
    that would open the server to everybody.
    """
    found = [("", key) for key in keys if key]
    name = ""
    for name in files:
        for number, line in enumerate(_text(name).splitlines(), 1):
            words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
            if len(words) > 2:
                raise UsageError(f"--api-key-file {name}: line {number} is neither KEY nor NAME KEY, nor a # comment")
            if words:
                found.append((words[0] if len(words) > 1 else "", words[-1]))
    if name and not found:
        raise UsageError(f"--api-key-file {name}: no key in it, which would open the server")
    return {key: name or f"key-{i}" for i, (name, key) in enumerate(found, 1)}


_READ: dict[str, str] = {}
"""Texts of pipes, `<(...)` of a shell, by name: they can be read only once, keys are asked for several times."""


def _text(name: str) -> str:
    """Text of a key file. Raises UsageError."""
    if name in _READ:
        return _READ[name]
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise UsageError(f"--api-key-file {name}: {reason}") from None
    if not Path(name).is_file():
        _READ[name] = text
    return text


def key_end(key: str) -> str:
    """A key as logs show it: its last four characters, if they are less than half of it."""
    return "****" + (key[-SHOWN:] if len(key) > 2 * SHOWN else "")


class KeyRing:
    """The keys that are accepted now; `replace` may be called at any time."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.replace(names)

    def replace(self, names: Mapping[str, str]) -> None:
        """Takes other keys: key to name."""
        self._keys = [(key.encode(), name) for key, name in names.items()]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def name_of(self, headers: Mapping[str, str]) -> str | None:
        """Name of the key in `Authorization: Bearer` or `X-Api-Key`, None without a known one.

        Clients of Anthropic's API may send both, one of them with a key for another server.
        """
        authorization = headers.get("authorization", "")
        bearer = authorization.removeprefix("Bearer ") if authorization.startswith("Bearer ") else ""
        sent = [text.encode("latin-1", "replace") for text in (bearer, headers.get("x-api-key", ""))]  # as received
        # Every key is compared, so that the time does not tell which one was close.
        found = [name for text in sent for key, name in self._keys if secrets.compare_digest(text, key)]
        return found[0] if found else None
