"""Regular expressions that may not match in an answer: searched character by character, in linear time.

The syntax is that of ECMAScript without look-around, back references and named groups. A pattern becomes a
nondeterministic automaton; the search keeps, for each of its states, where the match that reached it began. Text can
therefore wait exactly as long as a match may still begin there, and no pattern takes more than states x characters.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from re import compile as regex
from typing import TypeAlias

from ikpy.engine.grammars.operators import Choice, Group, Repeat

MOST_PATTERNS = 100
LONGEST_PATTERN = 500
"""Characters."""
MOST_STATES = 2000
"""Of the automaton of all patterns together."""
MOST_REPETITIONS = 1000
BACKSLASH = "\\"

Test = Callable[[str], bool]
"""Whether a character belongs to a set."""


class PatternError(ValueError):
    """A pattern that cannot be used; the message says why."""


@dataclass(frozen=True)
class Chars:
    """One character that passes a test."""

    test: Test


@dataclass(frozen=True)
class Edge:
    """A place between two characters: ``^`` ``$`` (of the answer or of a line), ``b`` ``B`` (of a word or not)."""

    kind: str


Node: TypeAlias = "Chars | Edge | Group[Node] | Choice[Node] | Repeat[Node]"


def is_word(char: str) -> bool:
    """Whether a character belongs to words; the empty text at both ends does not."""
    return char.isalnum() or char == "_"


CLASSES: dict[str, Test] = {"d": str.isdecimal, "s": str.isspace, "w": is_word}
CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


def inverse(test: Test) -> Test:
    """All other characters."""
    return lambda char: not test(char)


def any_of(tests: Sequence[Test]) -> Test:
    """Characters that pass one of several tests."""
    return lambda char: any(test(char) for test in tests)


def between(first: str, last: str, ignore_case: bool) -> Test:
    """Characters of a range."""
    if ignore_case:
        return lambda char: any(first <= form <= last for form in (char, char.lower(), char.upper()))
    return lambda char: first <= char <= last


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, text: str, ignore_case: bool) -> None:
        self.text = text
        self.ignore_case = ignore_case
        self.at = 0

    def pattern(self) -> Node:
        node = self.choice()
        if self.at < len(self.text):
            raise PatternError(f"unmatched ')' at {self.at + 1}")
        return node

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def next(self) -> str:
        char = self.peek()
        if not char:
            raise PatternError("unexpected end")
        self.at += 1
        return char

    def choice(self) -> Node:
        options = [self.row()]
        while self.peek() == "|":
            self.at += 1
            options.append(self.row())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def row(self) -> Node:
        items: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            items.append(self.repeated(self.atom()))
        return Group(tuple(items))

    def repeated(self, item: Node) -> Node:
        found = regex(r"([*+?])|\{(\d{1,9})(,?)(\d{0,9})\}").match(self.text, self.at)
        if not found:
            return item
        self.at = found.end() + self.text.startswith("?", found.end())  # lazy or not: what matches is the same
        if found[1]:
            return Repeat(item, int(found[1] == "+"), 1 if found[1] == "?" else None)
        low = int(found[2])
        high = int(found[4] or low) if found[4] or not found[3] else None
        if max(low, high or 0) > MOST_REPETITIONS or (high is not None and high < low):
            raise PatternError(f"repetition {found[0]} is out of range (0 to {MOST_REPETITIONS}, ascending)")
        return Repeat(item, low, high)

    def atom(self) -> Node:
        char = self.next()
        if char == "(":
            return self.group()
        if char == "[":
            return Chars(self.char_class())
        if char == ".":
            return Chars(lambda char: char not in "\r\n")
        if char in "^$":
            return Edge(char)
        if char in "*+?":
            raise PatternError(f"nothing to repeat at {self.at}")
        if char == BACKSLASH and self.peek() in ("b", "B"):
            return Edge(self.next())
        return Chars(self.escape() if char == BACKSLASH else between(char, char, self.ignore_case))

    def group(self) -> Node:
        if self.peek() == "?":
            if not self.text.startswith("?:", self.at):
                raise PatternError("look-around, named groups and flags are not supported")
            self.at += 2
        node = self.choice()
        if self.peek() != ")":
            raise PatternError("missing ')'")
        self.at += 1
        return node

    def escape(self) -> Test:
        """What stands behind a backslash, as a set."""
        if self.peek().lower() in CLASSES:
            char = self.next()
            return CLASSES[char] if char in CLASSES else inverse(CLASSES[char.lower()])
        char = self.escaped()
        return between(char, char, self.ignore_case)

    def escaped(self) -> str:
        """One character written behind a backslash."""
        char = self.next()
        if char in ("x", "u"):
            n = 2 if char == "x" else 4
            digits = self.text[self.at : self.at + n]
            if not regex(rf"[0-9A-Fa-f]{{{n}}}").fullmatch(digits):
                raise PatternError(f"\\{char} needs {n} hexadecimal digits")
            self.at += n
            return chr(int(digits, 16))
        if char.isalnum() and char not in CONTROLS:
            raise PatternError(f"\\{char} is not supported")
        return CONTROLS.get(char, char)

    def char_class(self) -> Test:
        negated = self.peek() == "^"
        self.at += negated
        tests: list[Test] = []
        while self.peek() != "]":
            char = self.next()
            if char == BACKSLASH:
                if self.peek().lower() in CLASSES:
                    tests.append(self.escape())
                    continue
                char = self.escaped()
            tests.append(self.char_range(char))
        self.at += 1
        return inverse(any_of(tests)) if negated else any_of(tests)

    def char_range(self, first: str) -> Test:
        last = first
        if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
            self.at += 1
            last = self.next()
            if last == BACKSLASH:
                last = self.escaped()
        if last < first:
            raise PatternError(f"range {first}-{last} is out of order")
        return between(first, last, self.ignore_case)


@dataclass
class _State:
    """A state with what leads on: a character, a place between characters, or nothing but the next states."""

    after: tuple[int, ...]
    test: Test | None = None
    edge: str = ""


@dataclass(frozen=True)
class Progress:
    """Searches behind some text: states with the byte where their matches began, the character before the next, bytes
    of an unfinished character, and the number of bytes up to these."""

    threads: tuple[tuple[int, int], ...] = ()
    before: str = ""
    pending: bytes = b""
    at: int = 0

    def begin(self) -> int | None:
        """The first byte that may belong to a match; None if there is none."""
        begins = [begin for _, begin in self.threads]
        return min(begins, default=self.at if self.pending else None)


class BanPatterns:
    """An automaton for several patterns, each with a flag: whether case does not matter.

    Raises PatternError.
    """

    def __init__(self, patterns: Iterable[tuple[str, bool]]) -> None:
        self._states = [_State(())]  # state 0 is the end of a match
        self._n_nodes = 0
        first = []
        for text, ignore_case in patterns:
            try:
                first.append(self._build(_Parser(text, ignore_case).pattern(), 0))
            except PatternError as error:
                raise PatternError(f"{text!r}: {error}") from None
            except RecursionError:
                raise PatternError(f"{text!r}: groups are nested too deeply") from None
        self._first = tuple(first)
        self._fresh: dict[tuple[bool, bool, str], tuple[int, ...]] = {}

    def feed(self, progress: Progress, piece: bytes) -> tuple[Progress, int | None]:
        """Goes on with the bytes of a token; also where the first match began that is complete now, if any."""
        text, n_used = codecs.utf_8_decode(progress.pending + piece, "surrogateescape", False)
        threads, before, at = progress.threads, progress.before, progress.at
        found: list[int] = []
        for char in text:
            ready = self._closure(threads, before, char, found)
            threads = self._step(ready, before, char, at)
            before, at = char, at + len(char.encode("utf-8", "surrogateescape"))
        self._closure(threads, before, None, found)
        return Progress(threads, before, (progress.pending + piece)[n_used:], at), min(found, default=None)

    def end(self, progress: Progress) -> int | None:
        """Where the first match began that is complete if the text ends here; None without one."""
        found: list[int] = []
        self._closure(progress.threads, progress.before, "", found)
        return min(found, default=None)

    def _add(self, state: _State) -> int:
        if len(self._states) >= MOST_STATES:
            raise PatternError(f"the patterns are too large: more than {MOST_STATES} states, repetitions written out")
        self._states.append(state)
        return len(self._states) - 1

    def _build(self, node: Node, after: int) -> int:
        """First state of a node that leads on to the state ``after``."""
        self._n_nodes += 1
        if self._n_nodes > 10 * MOST_STATES:  # repetitions of nothing
            raise PatternError("the patterns are too large")
        if isinstance(node, Chars):
            return self._add(_State((after,), test=node.test))
        if isinstance(node, Edge):
            return self._add(_State((after,), edge=node.kind))
        if isinstance(node, Group):
            for item in reversed(node.items):
                after = self._build(item, after)
            return after
        if isinstance(node, Choice):
            return self._add(_State(tuple(self._build(option, after) for option in node.options)))
        if node.high is None:
            loop = self._add(_State(()))
            self._states[loop].after = (self._build(node.item, loop), after)
            after = loop
        else:
            last = after
            for _ in range(node.high - node.low):
                after = self._add(_State((self._build(node.item, after), last)))
        for _ in range(node.low):
            after = self._build(node.item, after)
        return after

    def _closure(
        self, threads: Iterable[tuple[int, int]], before: str, after: str | None, found: list[int]
    ) -> list[tuple[int, int]]:
        """States that read a character, reached without one; beginnings of complete matches go to ``found``.

        ``after`` is the next character: empty at the end of the answer, None if it is not known yet.
        """
        ready: list[tuple[int, int]] = []
        seen: set[int] = set()
        stack = sorted(threads, key=lambda thread: -thread[1])  # the first to begin comes first
        while stack:
            number, begin = stack.pop()
            if number in seen:
                continue
            seen.add(number)
            state = self._states[number]
            if number == 0:
                found.append(begin)
            elif state.test:
                ready.append((number, begin))
            elif not state.edge or holds(state.edge, before, after):
                stack += [(other, begin) for other in state.after]
        return ready

    def _step(self, ready: list[tuple[int, int]], before: str, char: str, at: int) -> tuple[tuple[int, int], ...]:
        """States behind a character, which may also begin a match."""
        threads: dict[int, int] = {}
        for number, begin in ready:
            state = self._states[number]
            if state.test and state.test(char):
                threads.setdefault(state.after[0], begin)
        for number in self._begun(before, char):
            threads.setdefault(number, at)
        return tuple(threads.items())

    def _begun(self, before: str, char: str) -> tuple[int, ...]:
        """States behind a character that is the first of a match."""
        key = (before in ("", "\n"), is_word(before), char)
        if key not in self._fresh:
            ready = self._closure([(number, 0) for number in self._first], before, char, [])
            tests = [self._states[number] for number, _ in ready]
            self._fresh[key] = tuple({state.after[0] for state in tests if state.test and state.test(char)})
        return self._fresh[key]


def holds(edge: str, before: str, after: str | None) -> bool:
    """Whether a place between two characters is of a kind; False while that depends on an unknown one."""
    if edge == "^":
        return before in ("", "\n")
    if after is None:
        return False
    if edge == "$":
        return after in ("", "\n")
    return (is_word(before) != is_word(after)) == (edge == "b")
