"""Regular expressions of JSON schemas as GBNF (a subset: classes, groups, alternatives, repetitions)."""

from __future__ import annotations

import json
import re

_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": r" \t\n\r"}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "b": "\b"}


def pattern_to_gbnf(pattern: str, any_char: str) -> str:
    """Body between the quotes of a JSON string that matches ``pattern``; ``any_char``: rule of one character.

    Raises ValueError for patterns not wrapped in ``^`` and ``$`` and for unsupported syntax.
    """
    if not (pattern.startswith("^") and pattern.endswith("$")):
        raise ValueError("must start with '^' and end with '$'")
    parser = _PatternParser(pattern[1:-1], any_char)
    body = parser.choice()
    if parser.at < len(parser.text):
        raise ValueError(f"unexpected {parser.text[parser.at]!r} at {parser.at + 1}")
    return body


class _PatternParser:
    def __init__(self, text: str, any_char: str) -> None:
        self.text = text
        self.any_char = any_char
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
        if self.peek() in ("?", "+"):
            raise ValueError(f"lazy or possessive repetition at {self.at + 1}")
        return match[0]

    def atom(self) -> str:
        char = self.peek()
        self.at += 1
        if char == "(":
            return self.group()
        if char == "[":
            return self.char_class()
        if char == ".":
            return self.any_char
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
        self.at += 1
        if char in _CLASSES:
            return f"[{_CLASSES[char]}]" if char != "s" else '(" " | "\\\\t" | "\\\\n" | "\\\\r")'
        if char.lower() in _CLASSES:
            return f'[^{_CLASSES[char.lower()]}"\\\\\\x00-\\x1F]'
        if char.isalnum() and char not in _CONTROLS:
            raise ValueError(f"escape \\{char} is not supported")
        return _json_literal(_CONTROLS.get(char, char))

    def char_class(self) -> str:
        negated = self.peek() == "^"
        self.at += negated
        body = ""
        while self.peek() != "]" or not body:
            char = self.peek()
            if not char:
                raise ValueError("missing ']'")
            self.at += 1
            if char == "\\":
                char = self.peek()
                self.at += 1
                if char in _CLASSES:
                    body += _CLASSES[char]
                    continue
                body += _class_char(_CONTROLS.get(char, char))
            elif char == "-" and body and self.peek() != "]":
                body += "-"
            else:
                body += _class_char(char)
        self.at += 1
        if negated:
            return f'[^{body}"\\\\\\x00-\\x1F]'
        if '\\"' in body or "\\\\" in body:
            raise ValueError("quotes and backslashes in a class are not supported")
        return f"[{body}]"


def _class_char(char: str) -> str:
    return f"\\{char}" if char in '\\[]"' else f"\\x{ord(char):02X}" if char in "^-" else char


def _json_literal(char: str) -> str:
    text = json.dumps(char, ensure_ascii=False)[1:-1]
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
