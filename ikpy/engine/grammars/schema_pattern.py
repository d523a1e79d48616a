"""Regular expressions of JSON schemas as GBNF (a subset: classes, groups, alternatives, repetitions)."""

from __future__ import annotations

import json
import re

from ikpy.engine.grammars.gbnf import literal

Ranges = list[tuple[int, int]]

_CLASSES = {"d": "09", "w": "azAZ09__", "s": "  \t\t\n\n\r\r"}
# All white space of regular expressions: what \S excludes, more than \s gives.
_SPACES = "\t\r  \xa0\xa0\u1680\u1680\u2000\u200a\u2028\u2029\u202f\u202f\u205f\u205f\u3000\u3000\ufeff\ufeff"
_EXCLUDED = _CLASSES | {"s": _SPACES}
_LINE_ENDS = "\n\n\r\r\u2028\u2029"
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_HEX_ESCAPES = {"x": 2, "u": 4}
# Characters that a JSON string has as escapes only, and those of them that classes of all other characters give.
_ESCAPED: Ranges = [(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))]
_COMMON_ESCAPES = '"\\\b\t\n\f\r'


def is_whole(pattern: str) -> bool:
    """Whether a pattern is wrapped in ``^`` and ``$``."""
    end = re.search(r"(\\*)\$$", pattern)
    return pattern.startswith("^") and end is not None and len(end[1]) % 2 == 0


def pattern_to_gbnf(pattern: str) -> str:
    """Body between the quotes of a JSON string that matches ``pattern``.

    Raises ValueError for patterns not wrapped in ``^`` and ``$`` and for unsupported syntax.
    """
    if not is_whole(pattern):
        raise ValueError("must start with '^' and end with '$'")
    parser = _PatternParser(pattern[1:-1])
    body = parser.choice()
    if parser.at < len(parser.text):
        raise ValueError(f"unexpected {parser.text[parser.at]!r} at {parser.at + 1}")
    return body


class _PatternParser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def choice(self) -> str:
        options = [self.sequence()]
        while self.peek() == "|":
            self.at += 1
            options.append(self.sequence())
        return " | ".join(options)

    def sequence(self) -> str:
        items = []
        while self.peek() not in ("", "|", ")"):
            items.append(self.atom() + self.repetition())
        return " ".join(items) or '""'

    def repetition(self) -> str:
        match = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}").match(self.text, self.at)
        if not match:
            return ""
        self.at = match.end()
        if self.peek() == "?":
            self.at += 1  # lazy: of whole texts the same ones match
        elif self.peek() == "+":
            raise ValueError(f"possessive repetition at {self.at + 1}")
        return match[0]

    def atom(self) -> str:
        char = self.peek()
        self.at += 1
        if char == "(":
            return self.group()
        if char == "[":
            return self.char_class()
        if char == ".":
            return _all_but(_ranges(_LINE_ENDS))
        if char == "\\":
            return self.escape()
        if char in "*+?{^$":
            raise ValueError(f"unexpected {char!r} at {self.at}")
        return _json_literal(char)

    def group(self) -> str:
        if self.text.startswith("?", self.at):
            if not self.text.startswith("?:", self.at):
                raise ValueError("look-around and named groups are not supported")
            self.at += 2
        body = self.choice()
        if self.peek() != ")":
            raise ValueError("missing ')'")
        self.at += 1
        return f"({body})"

    def escape(self) -> str:
        char = self.peek()
        if char in _CLASSES:
            self.at += 1
            return _one_of(_ranges(_CLASSES[char]))
        if char.lower() in _CLASSES:
            self.at += 1
            return _all_but(_ranges(_EXCLUDED[char.lower()]))
        return _json_literal(self.escaped())

    def escaped(self) -> str:
        """The character of an escape, behind its backslash."""
        char = self.peek()
        self.at += 1
        if char in _HEX_ESCAPES:
            digits = re.compile(f"[0-9A-Fa-f]{{{_HEX_ESCAPES[char]}}}").match(self.text, self.at)
            if not digits or 0xD800 <= int(digits[0], 16) < 0xE000:
                raise ValueError(f"escape \\{char} without the number of a character")
            self.at = digits.end()
            return chr(int(digits[0], 16))
        if not char or (char.isalnum() and char not in _CONTROLS):
            raise ValueError(f"escape \\{char} is not supported")
        return _CONTROLS.get(char, char)

    def char_class(self) -> str:
        negated = self.peek() == "^"
        self.at += negated
        ranges: Ranges = []
        while self.peek() != "]" or not ranges:
            if self.peek() == "\\" and self.text[self.at + 1 : self.at + 2] in _CLASSES:
                ranges += _ranges(_CLASSES[self.text[self.at + 1]])
                self.at += 2
                continue
            first = last = self.class_char()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                last = self.class_char()
            if last < first:
                raise ValueError(f"range out of order at {self.at}")
            ranges.append((ord(first), ord(last)))
        self.at += 1
        return _all_but(ranges) if negated else _one_of(ranges)

    def class_char(self) -> str:
        char = self.peek()
        if not char:
            raise ValueError("missing ']'")
        self.at += 1
        if char != "\\":
            return char
        if self.peek() == "b":  # a backspace, in classes only
            self.at += 1
            return "\b"
        return self.escaped()


def _ranges(pairs: str) -> Ranges:
    """Ranges from a text of first and last characters."""
    return [(ord(first), ord(last)) for first, last in zip(pairs[::2], pairs[1::2], strict=True)]


def _without(ranges: Ranges, removed: Ranges) -> Ranges:
    """The characters of ``ranges`` that are not in ``removed``."""
    for low, high in removed:
        ranges = [
            part for a, b in ranges for part in ((a, min(b, low - 1)), (max(a, high + 1), b)) if part[0] <= part[1]
        ]
    return ranges


def _one_of(ranges: Ranges) -> str:
    """One character of ``ranges`` as JSON strings have it."""
    raw = _without(ranges, _ESCAPED)
    plain = [f"[{_class_body(raw)}]"] if raw else []
    escaped = [c for a, b in _ESCAPED for c in range(a, b + 1) if any(low <= c <= high for low, high in ranges)]
    return _grouped(plain + [_json_literal(chr(c)) for c in escaped])


def _all_but(ranges: Ranges) -> str:
    """One character that is not in ``ranges``; of those with escapes only the common ones."""
    free = [c for c in _COMMON_ESCAPES if not any(low <= ord(c) <= high for low, high in ranges)]
    return _grouped([f"[^{_class_body(ranges + _ESCAPED)}]", *map(_json_literal, free)])


def _grouped(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _class_body(ranges: Ranges) -> str:
    return "".join(f"{_class_char(a)}-{_class_char(b)}" if a < b else _class_char(a) for a, b in ranges)


def _class_char(code: int) -> str:
    char = chr(code)
    if char in '\\[]"':
        return f"\\{char}"
    return f"\\x{code:02X}" if code < 0x20 or code == 0x7F or char in "^-" else char


def _json_literal(char: str) -> str:
    return literal(json.dumps(char, ensure_ascii=False)[1:-1])
