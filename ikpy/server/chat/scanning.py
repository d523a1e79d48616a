"""Places in texts that hold values between brackets."""

from __future__ import annotations

DEEPEST = 100
"""Values within values that are read."""


def behind_comma(text: str, at: int, closing: str) -> int:
    """The place of the next value, or of the closing bracket. Raises ValueError."""
    at = behind_blanks(text, at)
    if text.startswith(",", at):
        return behind_blanks(text, at + 1)
    if not text.startswith(closing, at):
        raise ValueError("no comma")
    return at


def behind_blanks(text: str, at: int) -> int:
    """The first place from ``at`` on that is not blank."""
    while text[at : at + 1].isspace():
        at += 1
    return at
