"""Reading tool calls while they come: JSON objects between tags, or behind a name.

What does not follow the format is given back as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ikpy.engine.grammars import strict_json
from ikpy.server.chat.scanning import Brackets

NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
ARGUMENTS = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*\{(?=\s*["}])')
FUNCTION_HEAD = re.compile(r"([^\s<>{]+)>\s*\{")
NAMED_HEAD = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*([^\s\[{]+)\s*)?\[ARGS\]\s*\{")
LONGEST_HEAD = 500
"""Characters after which `NAMED_HEAD` is not looked for any more."""
NO_JSON = ("NaN", "Infinity", "-Infinity")
ARGUMENTS_BEGIN = re.compile(r'\s*(,\s*("(a|p)?[a-z]*("\s*(:\s*(\{\s*)?)?)?)?)?$')


@dataclass(frozen=True)
class CallPart:
    """Name of a new call, more of the arguments of the present one, or text that is no call (``raw``)."""

    arguments: str = ""
    name: str | None = None
    call_id: str | None = None
    raw: str = ""


class CallReader:
    """Reads what follows the opening marker; ``rest`` is the text behind the call once it has ended. At the end of the
    answer, ``stop`` is the stop string that stood there and is not given out; ``cut``: a limit has ended it."""

    rest: str | None = None
    stop: str = ""
    cut: bool = False

    @property
    def may_be_text(self) -> bool:
        """Whether what has come, and was not given out, may be the beginning of something else than a call."""
        return False

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """Parts that new text completes; ``final``: nothing follows."""
        raise NotImplementedError


class SteppedReader(CallReader):
    """A reader whose ``_step`` takes what it can of ``_text`` and names the next; ``_held``: text of no call yet."""

    _text = ""
    _held = ""
    _step: Callable[[bool], Iterator[CallPart]]

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """Parts that new text completes."""
        self._text += text
        step = None
        while self.rest is None and step != self._step:
            step = self._step
            yield from step(final)
        if final and self.rest is None:
            self.rest = ""

    def _skip(self, n: int) -> None:
        """Takes text that is given back if no call follows."""
        self._held += self._text[:n]
        self._text = self._text[n:]

    def _skip_blanks(self) -> None:
        self._skip(len(self._text) - len(self._text.lstrip()))


class Rules(Protocol):
    """Adds grammar rules for values."""

    def spend(self) -> None:
        """Counts a schema of which other rules are made; raises GrammarError for too many."""
        ...

    def schema(self, schema: Any, root: Any = None) -> str:
        """Name of a rule for the JSON values of a schema; its references are looked up in ``root`` if it is a part."""
        ...

    def rule(self, text: str) -> str:
        """Name of a rule with this body."""
        ...


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    ``opening`` starts a call or a list of calls. ``behind`` is GBNF of what follows it, with the rules ``call`` (one
    call) and ``calls`` (one, or several if wanted); ``@{text}`` in it is a marker that may be one control token.
    ``call`` writes one call as GBNF from the name of the tool, its schema and the `Rules` for parts of it. ``again``
    stands between two openings, ``separator`` between two of ``calls``. ``markers`` are texts of tokens that must be
    visible in the output. ``lead`` is GBNF of what stands before ``behind`` and ``trigger`` the text at its end, if
    that is not just the opening. ``example`` is a call with NAME and ARGUMENTS in it, for families whose templates do
    not show tools to the model. ``reader_of`` makes a reader that knows the functions, for families in which the types
    of arguments cannot be seen. ``others`` are openings that models write now and then, with readers of their own;
    ``others_of``: those of tools that have markers of their own.
    ``holds_begun``: whether a grammar holds behind the opening where a call is not asked for, as nothing else has it.
    """

    name: str
    opening: str
    reader: Callable[[], CallReader]
    behind: str
    call: Callable[[str, Any, Rules], str]
    again: str | None = None
    markers: tuple[str, ...] = ()
    lead: str = ""
    trigger: str = ""
    example: str = ""
    separator: str = r'"\n"?'
    reader_of: Callable[[Sequence[Mapping[str, Any]]], CallReader] | None = None
    others: Mapping[str, Callable[[], CallReader]] = field(default_factory=dict, hash=False)
    others_of: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Callable[[], CallReader]]] | None = None
    holds_begun: bool = True

    @property
    def readers(self) -> dict[str, Callable[[], CallReader]]:
        """Makers of readers by opening."""
        return {self.opening: self.reader, **self.others}

    def knowing(self, functions: Sequence[Mapping[str, Any]]) -> ToolFormat:
        """The format for calls of these functions."""
        make, others = self.reader_of, self.others_of(functions) if self.others_of is not None else {}
        known = self if make is None else replace(self, reader=lambda: make(functions))
        return replace(known, others={**self.others, **others}, markers=(*self.markers, *others)) if others else known


class TaggedCall(CallReader):
    """One object with name and arguments up to a closing tag; arguments are given out as they come."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._text = ""
        self._name: str | None = None
        self._started = False
        self._arguments: ArgumentsScanner | None = None
        self._at = 0

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """Parts that new text completes."""
        self._text += text
        if self._arguments is None:
            yield from self._head(final)
        if self._arguments is not None:
            out = self._arguments.feed(self._text[self._at :])
            self._at = len(self._text)
            if out:
                yield CallPart(out)
        yield from self._close(final)

    def _head(self, final: bool) -> Iterator[CallPart]:
        """Name and the beginning of the arguments; anything else makes the whole a text."""
        name = NAME.match(self._text)
        found = name and ARGUMENTS.match(self._text, name.end())
        if name and found:
            self._arguments = ArgumentsScanner()
            self._at = found.end()
            yield CallPart("{", decoded(name[1]))
            return
        end = self._text.find(self._closing, self._at)
        self._at = max(0, len(self._text) - len(self._closing))  # for the next search
        cut = final and name and ARGUMENTS_BEGIN.match(self._text, name.end())
        if end >= 0:
            whole = read_object(self._text[:end])
            if whole is not None:
                yield CallPart(whole[1], whole[0])
            else:
                yield CallPart(raw=self._opening + self._text[: end + len(self._closing)])
            self.rest = self._text[end + len(self._closing) :]
        elif cut and name:
            yield CallPart("{", decoded(name[1]))
            self.rest = ""
        elif final:
            yield CallPart(raw=self._opening + self._text)
            self.rest = ""

    def _close(self, final: bool) -> Iterator[CallPart]:
        """Looks for the closing tag behind the arguments."""
        if self._arguments is None or not self._arguments.ended or self.rest is not None:
            if final and self.rest is None:
                self.rest = ""
            return
        between, found, rest = self._arguments.behind.partition(self._closing)
        if found or final:
            self.rest = rest
            yield from further_calls(between)


class NamedCall(CallReader):
    """A name, an id if there is one, and arguments behind a marker, which are given out as they come. ``head``: up to
    the opening brace of the arguments; ``closing``: what stands behind them, a model may leave it out."""

    def __init__(self, opening: str, head: re.Pattern[str] = NAMED_HEAD, closing: str = "") -> None:
        self._opening, self._head, self._closing = opening, head, closing
        self._text = ""
        self._arguments: ArgumentsScanner | None = None

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """Parts that new text completes; nothing marks the end of a call but its closing brace."""
        if self._arguments is None:
            hopeless = len(self._text) > LONGEST_HEAD
            self._text += text
            head = None if hopeless else self._head.match(self._text)
            if head is None:
                if final:
                    self.rest = ""
                    yield CallPart(raw=self._opening + self._text)
                return
            self._arguments, text = ArgumentsScanner(), self._text[head.end() :]
            yield CallPart("{", head[1], head[2] if self._head.groups > 1 else None)
        out = self._arguments.feed(text)
        if out:
            yield CallPart(out)
        behind = self._arguments.behind.lstrip() if self._closing else self._arguments.behind
        may_close = self._closing.startswith(behind) and behind != self._closing
        if final or (self._arguments.ended and not may_close):
            self.rest = "" if may_close else behind.removeprefix(self._closing)


class ArgumentsScanner:
    """Follows a JSON object behind its opening brace; blanks between values wait for what follows them, and words that
    are no JSON become null."""

    def __init__(self) -> None:
        self.ended = False
        self.behind = ""
        self._brackets = Brackets(1)
        self._blank = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """Text of the object; what follows it is collected in ``behind``."""
        if self.ended:
            self.behind += text
            return ""
        found = []
        for i, char in enumerate(text):
            self.ended = self._brackets.step(char)
            if not self._brackets.in_string and (char.isalpha() or char == "-"):
                self._word += char
                continue
            found += [self._taken_word(), char]
            if self.ended:
                self.behind = text[i + 1 :]
                break
        if not any(word.startswith(self._word) for word in NO_JSON):
            found.append(self._taken_word())
        text = "".join(found)
        text, self._blank = self._blank + text, ""
        if not self._brackets.in_string and not self.ended:
            kept = text.rstrip()
            text, self._blank = kept, text[len(kept) :]
        return text

    def _taken_word(self) -> str:
        word, self._word = self._word, ""
        return "null" if word in NO_JSON else word


def further_calls(text: str) -> Iterator[CallPart]:
    """Calls behind the arguments of one, where some models write several objects between two tags."""
    scanner = ArgumentsScanner()
    scanner.feed(text)
    rest = scanner.behind.lstrip()
    while rest.startswith("{"):
        try:
            value, end = strict_json.WITHOUT_CONSTANTS.raw_decode(rest)
        except (ValueError, RecursionError):
            return
        if (call := named_call(value)) is not None:
            yield CallPart(call[1], call[0])
        rest = rest[end:].lstrip()


def parse_value(text: str) -> Any:
    """Value of generated JSON text. Raises ValueError, also for one that is nested too deep to be read or has numbers
    that JSON cannot write."""
    try:
        return strict_json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def value_or_text(text: str) -> Any:
    """The value of a text that is JSON, any other text itself."""
    try:
        return parse_value(text)
    except ValueError:
        return text


def decoded(name: str) -> str:
    """What a JSON string without its quotes stands for; one that is no JSON stays as it is."""
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


def read_object(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete object, in any order of its fields; None if it is none."""
    try:
        call = named_call(strict_json.WITHOUT_CONSTANTS.decode(text))
    except (ValueError, RecursionError):
        return None
    return None if call is None else call[:2]


def named_call(value: Any) -> tuple[str, str, str | None] | None:
    """Name, arguments as JSON text and id of a call; None if the value is none."""
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(name, str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call_id = value.get("id")
    return name, text, call_id if isinstance(call_id, str) else None
