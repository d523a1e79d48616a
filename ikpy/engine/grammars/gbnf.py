"""GBNF grammars: parser and checks (cli.md#grammars)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ikpy.engine.grammars.operators import Choice, Group, Repeat
from ikpy.errors import UsageError

MOST_REPETITIONS = 10_000
"""Repetitions that are counted. Each takes states of an automaton, of which an answer has a million."""
LAST_CHARACTER = 0x10FFFF
TOO_DEEP = "error parsing grammar: groups are nested too deeply"
LONGEST_MESSAGE = 500
"""Characters of an error; names and expressions of a grammar may be much longer."""


class GrammarError(UsageError):
    """A grammar that cannot be used; the message says where, the middle of a long one is left out."""

    def __init__(self, message: str) -> None:
        half = LONGEST_MESSAGE // 2
        super().__init__(message if len(message) <= LONGEST_MESSAGE else f"{message[:half]} ... {message[-half:]}")


def literal(text: str) -> str:
    """GBNF literal of ``text``."""
    escaped = []
    for char in text:
        if char in '"\\':
            escaped.append("\\" + char)
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            escaped.append(f"\\x{ord(char):02X}")
        else:
            escaped.append(char)
    return f'"{"".join(escaped)}"'


def upper_limit(count: float | None) -> int | None:
    """The most repetitions that a grammar is held to, None for any number: above those that are counted, too."""
    return None if count is None or count > MOST_REPETITIONS else int(count)


@dataclass(frozen=True)
class Literal:
    """Fixed text."""

    text: str


@dataclass(frozen=True)
class CharClass:
    """One character in (or, negated, outside) code point ranges."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True)
class Ref:
    """Another rule."""

    name: str


@dataclass(frozen=True)
class TokenRef:
    """One token, by id or by text; negated: any other token."""

    token: int | str
    negated: bool = False


Node: TypeAlias = "Literal | CharClass | Ref | TokenRef | Group[Node] | Choice[Node] | Repeat[Node]"
Rules = dict[str, Node]

_SIMPLE_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


class _Parser:
    """Recursive descent over the source; every error names the rest of the text from where it occurred."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0

    def error(self, message: str, at: int | None = None) -> GrammarError:
        at = self.at if at is None else at
        line = self.source.count("\n", 0, at) + 1
        rest = self.source[at : at + 60].strip() or "the end"
        return GrammarError(f"error parsing grammar: {message} at {rest} (line {line})")

    def peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def space(self, newlines: bool) -> None:
        """Skips blanks and comments, and line ends where ``newlines``."""
        pattern = r"(?:[ \t]|#[^\r\n]*|[\r\n])*" if newlines else r"(?:[ \t]|#[^\r\n]*)*"
        match = re.compile(pattern).match(self.source, self.at)
        self.at = match.end() if match else self.at

    def name(self) -> str:
        match = re.compile(r"[A-Za-z0-9-]+").match(self.source, self.at)
        if not match:
            raise self.error("expecting name")
        self.at = match.end()
        return match[0]

    def rules(self) -> Rules:
        rules: Rules = {}
        self.space(True)
        while self.at < len(self.source):
            name = self.name()
            self.space(False)
            if not self.source.startswith("::=", self.at):
                raise self.error("expecting ::=")
            self.at += 3
            self.space(True)
            rules[name] = self.choice(nested=False)
            if self.peek() not in ("", "\r", "\n"):
                raise self.error("expecting newline or end")
            self.space(True)
        return rules

    def choice(self, nested: bool) -> Node:
        options = [self.sequence(nested)]
        while self.peek() == "|":
            self.at += 1
            self.space(True)
            options.append(self.sequence(nested))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        while True:
            item = self.item()
            if item is None:
                return items[0] if len(items) == 1 else Group(tuple(items))
            self.space(nested)
            items.append(self.repetitions(item, nested))

    def item(self) -> Node | None:
        char = self.peek()
        if char == '"':
            return Literal(self.quoted())
        if char == "[":
            return self.char_class()
        if char == ".":
            self.at += 1
            return CharClass(((0, LAST_CHARACTER),))
        if char == "(":
            self.at += 1
            self.space(True)
            node = self.choice(nested=True)
            if self.peek() != ")":
                raise self.error("expecting ')'")
            self.at += 1
            return node
        if char in ("<", "!"):
            return self.token()
        return Ref(self.name()) if char and re.match(r"[A-Za-z0-9-]", char) else None

    def character(self) -> str:
        """One character of a literal or class, escapes decoded."""
        char = self.peek()
        if not char:
            raise self.error("unexpected end of input")
        self.at += 1
        if char != "\\":
            return char
        code = self.peek()
        if code in _HEX_ESCAPES:
            digits = self.source[self.at + 1 : self.at + 1 + _HEX_ESCAPES[code]]
            if not re.fullmatch(rf"[0-9A-Fa-f]{{{_HEX_ESCAPES[code]}}}", digits):
                raise self.error(f"expecting {_HEX_ESCAPES[code]} hex chars", self.at - 1)
            value = int(digits, 16)
            if value > LAST_CHARACTER or 0xD800 <= value < 0xE000:
                raise self.error("no such character", self.at - 1)
            self.at += 1 + len(digits)
            return chr(value)
        if not code or code not in _SIMPLE_ESCAPES:
            raise self.error("unknown escape", self.at - 1)
        self.at += 1
        return _SIMPLE_ESCAPES[code]

    def quoted(self) -> str:
        self.at += 1
        text = []
        while self.peek() != '"':
            text.append(self.character())
        self.at += 1
        return "".join(text)

    def char_class(self) -> Node:
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges = []
        while self.peek() != "]":
            first = last = ord(self.character())
            if self.peek() == "-" and self.source[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                last = ord(self.character())
            if last < first:
                raise self.error("character range out of order")
            ranges.append((first, last))
        self.at += 1
        return CharClass(tuple(ranges), negated)

    def token(self) -> Node:
        match = re.compile(r"(!?)<(?:\[([0-9]{1,9})\]|([^>\[\]\n]+))>").match(self.source, self.at)
        if not match:
            raise self.error("expecting a token such as <[1234]> or <name>")
        self.at = match.end()
        return TokenRef(int(match[2]) if match[2] else f"<{match[3]}>", bool(match[1]))

    def repetitions(self, item: Node, nested: bool) -> Node:
        while True:
            char = self.peek()
            if char in ("*", "+", "?"):
                self.at += 1
                item = Repeat(item, int(char == "+"), 1 if char == "?" else None)
            elif char == "{":
                item = self.counted(item)
            else:
                return item
            self.space(nested)

    def counted(self, item: Node) -> Node:
        match = re.compile(r"\{\s*([0-9]{1,99})\s*(?:(,)\s*([0-9]{0,99})\s*)?\}").match(self.source, self.at)
        if not match:
            raise self.error("expecting {m}, {m,} or {m,n}")
        low = int(match[1])
        high = None if match[2] and not match[3] else int(match[3] or match[1])
        if low > MOST_REPETITIONS:
            raise self.error(f"number of repetitions exceeds {MOST_REPETITIONS}")
        if high is not None and high < low:
            raise self.error("repetition limits out of order")
        self.at = match.end()
        return Repeat(item, low, upper_limit(high))


def parse_gbnf(source: str) -> Rules:
    """Rules of a grammar, checked: ``root`` exists, no rule is undefined or left-recursive.

    Raises GrammarError with the place of the error.
    """
    try:
        return _checked(_Parser(source).rules())
    except RecursionError:
        raise GrammarError(TOO_DEEP) from None


def _checked(rules: Rules) -> Rules:
    if "root" not in rules:
        raise GrammarError("error parsing grammar: grammar does not contain a 'root' symbol")
    for name, node in rules.items():
        for used in _refs(node):
            if used not in rules:
                raise GrammarError(f"error parsing grammar: undefined rule '{used}' (used in rule '{name}')")
    _refuse_left_recursion(rules)
    return rules


def children(node: Node) -> Sequence[Node]:
    """Nodes directly inside ``node``."""
    if isinstance(node, Group):
        return node.items
    if isinstance(node, Choice):
        return node.options
    return (node.item,) if isinstance(node, Repeat) else ()


def _refs(node: Node) -> Iterator[str]:
    if isinstance(node, Ref):
        yield node.name
    for child in children(node):
        yield from _refs(child)


def _nullable_rules(rules: Rules) -> set[str]:
    """Rules that can be empty. Every node counts the parts that must still be found empty, so the time is linear."""
    above: list[int | str] = []  # of every node, the node around it or the rule it is
    missing: list[int] = []
    users: dict[str, list[int]] = {name: [] for name in rules}
    found: list[int] = []
    for name, rule in rules.items():
        stack: list[tuple[Node, int | str]] = [(rule, name)]
        while stack:
            node, parent = stack.pop()
            parts, number = children(node), len(above)
            above.append(parent)
            missing.append(len(parts) if isinstance(node, Group) else 1)
            if isinstance(node, Ref):
                users[node.name].append(number)
            elif _is_empty(node):
                found.append(number)
            stack += [(part, number) for part in parts]
    empty: set[str] = set()
    done: set[int] = set()
    while found:
        number = found.pop()
        if number in done:
            continue
        done.add(number)
        parent = above[number]
        if isinstance(parent, str):
            empty.add(parent)
            found += users[parent]
        else:
            missing[parent] -= 1
            if missing[parent] <= 0:
                found.append(parent)
    return empty


def _is_empty(node: Node) -> bool:
    """Whether a node can be empty whatever other rules are."""
    if isinstance(node, Literal):
        return not node.text
    return (isinstance(node, Group) and not node.items) or (isinstance(node, Repeat) and node.low == 0)


def _refuse_left_recursion(rules: Rules) -> None:
    empty = _nullable_rules(rules)

    def leading(node: Node, names: list[str]) -> bool:
        """Adds the rules that can stand first in ``node``; whether it can be empty."""
        if isinstance(node, Ref):
            names.append(node.name)
            return node.name in empty
        if isinstance(node, Group):
            return all(leading(item, names) for item in node.items)
        if isinstance(node, Choice):
            return any([leading(option, names) for option in node.options])
        if isinstance(node, Repeat):
            return leading(node.item, names) or node.low == 0
        return _is_empty(node)

    first: dict[str, list[str]] = {name: [] for name in rules}
    before: dict[str, list[str]] = {name: [] for name in rules}
    for name, node in rules.items():
        leading(node, first[name])
        for used in first[name]:
            before[used].append(name)
    # Rules whose first rules are all known to end cannot recurse; each of those left leads to another one left.
    open_ends = {name: len(names) for name, names in first.items()}
    ending = [name for name, count in open_ends.items() if not count]
    while ending:
        for name in before[ending.pop()]:
            open_ends[name] -= 1
            if not open_ends[name]:
                ending.append(name)
    at = next((name for name, count in open_ends.items() if count), None)
    if at is None:
        return
    path: dict[str, None] = {}
    while at not in path:
        path[at] = None
        at = next(name for name in first[at] if open_ends[name])
    cycle = set(list(path)[list(path).index(at) :])
    name = next(name for name in rules if name in cycle)
    raise GrammarError(f"error parsing grammar: left recursion in rule '{name}'")
