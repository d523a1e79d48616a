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


class Brackets:
    """Follows JSON text character by character. ``depth``: brackets that are open."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.in_string = False
        self._escaped = False

    def step(self, char: str) -> bool:
        """Takes a character; whether it closes the outermost bracket, or one that was never opened."""
        if self.in_string:
            self.in_string = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
            return False
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            return self.depth <= 0
        return False
