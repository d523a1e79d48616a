"""How templates let models write tool calls, and reading such calls while they come.

Supported: one JSON object with name and arguments per call between tags (Hermes, Qwen), and a JSON list of such objects
behind a marker (Mistral). What does not follow the format is given back as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ikpy.server.errors import bad_request

NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
ARGUMENTS = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*\{(?=\s*["}])')
ARGUMENTS_BEGIN = re.compile(r'\s*(,\s*("(a|p)?[a-z]*("\s*(:\s*(\{\s*)?)?)?)?)?$')


@dataclass(frozen=True)
class CallPart:
    """Name of a new call, more of the arguments of the present one, or text that is no call (``raw``)."""

    arguments: str = ""
    name: str | None = None
    call_id: str | None = None
    raw: str = ""


class CallReader:
    """Reads what follows the opening marker; ``rest`` is the text behind the call once it has ended."""

    rest: str | None = None

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """Parts that new text completes; ``final``: nothing follows."""
        raise NotImplementedError


@dataclass(frozen=True)
class ToolFormat:
    """``opening`` starts a call or a list of calls, ``call_rule`` is GBNF for one with the rule ``call`` in it."""

    name: str
    opening: str
    reader: Callable[[], CallReader]
    root: str


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
        self._close(final)

    def _head(self, final: bool) -> Iterator[CallPart]:
        """Name and the beginning of the arguments; anything else makes the whole a text."""
        name = NAME.match(self._text)
        found = name and ARGUMENTS.match(self._text, name.end())
        if name and found:
            self._arguments = ArgumentsScanner()
            self._at = found.end()
            yield CallPart("{", self._decoded(name[1]))
            return
        end = self._text.find(self._closing)
        cut = final and name and ARGUMENTS_BEGIN.match(self._text, name.end())
        if end >= 0:
            whole = read_object(self._text[:end])
            if whole is not None:
                yield CallPart(whole[1], whole[0])
            else:
                yield CallPart(raw=self._opening + self._text[: end + len(self._closing)])
            self.rest = self._text[end + len(self._closing) :]
        elif cut and name:
            yield CallPart("{", self._decoded(name[1]))
            self.rest = ""
        elif final:
            yield CallPart(raw=self._opening + self._text)
            self.rest = ""

    @staticmethod
    def _decoded(name: str) -> str:
        try:
            return str(json.loads(f'"{name}"'))
        except ValueError:
            return name

    def _close(self, final: bool) -> None:
        """Looks for the closing tag behind the arguments."""
        if self._arguments is None or not self._arguments.ended or self.rest is not None:
            if final and self.rest is None:
                self.rest = ""
            return
        _, found, rest = self._arguments.behind.partition(self._closing)
        if found:
            self.rest = rest
        elif final:
            self.rest = ""


class ArgumentsScanner:
    """Follows a JSON object behind its opening brace; blanks between values wait for what follows them."""

    def __init__(self) -> None:
        self.ended = False
        self.behind = ""
        self._depth = 1
        self._in_string = False
        self._escaped = False
        self._blank = ""

    def feed(self, text: str) -> str:
        """Text of the object; what follows it is collected in ``behind``."""
        if self.ended:
            self.behind += text
            return ""
        for i, char in enumerate(text):
            self._step(char)
            if self.ended:
                self.behind = text[i + 1 :]
                text = text[: i + 1]
                break
        text, self._blank = self._blank + text, ""
        if not self._in_string and not self.ended:
            kept = text.rstrip()
            text, self._blank = kept, text[len(kept) :]
        return text

    def _step(self, char: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.ended = self._depth == 0


class ListedCalls(CallReader):
    """A JSON list of objects with name and arguments, read as a whole."""

    def __init__(self, opening: str) -> None:
        self._opening = opening
        self._text = ""

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """The calls once the list is complete."""
        self._text += text
        start = self._text.lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(start)
        except ValueError:
            if final:
                self.rest = ""
                yield CallPart(raw=self._opening + self._text)
            return
        calls = [named_call(item) for item in (value if isinstance(value, list) else [value])]
        self.rest = start[end:]
        if calls and all(calls):
            for call in calls:
                assert call is not None
                yield CallPart(call[1], call[0], call[2])
        else:
            yield CallPart(raw=self._opening + self._text[: len(self._text) - len(self.rest)])


def read_object(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete object, in any order of its fields; None if it is none."""
    try:
        call = named_call(json.loads(text))
    except ValueError:
        return None
    return None if call is None else call[:2]


def named_call(value: Any) -> tuple[str, str, str | None] | None:
    """Name, arguments as JSON text and id of a call; None if the value is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call_id = value.get("id")
    return value["name"], text, call_id if isinstance(call_id, str) else None


HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    lambda: TaggedCall("<tool_call>", "</tool_call>"),
    r'"<tool_call>\n" call "\n</tool_call>"',
)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", lambda: ListedCalls("[TOOL_CALLS]"), r'"[TOOL_CALLS] [" call "]"')


def tool_format(template: str) -> ToolFormat | None:
    """How a template lets the model write calls; None when it knows no tools or an unsupported way."""
    if "tools" not in template:
        return None
    for known in (HERMES, MISTRAL):
        if known.opening in template and "<arg_key>" not in template:
            return known
    return None


GRAMMAR_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[A-Za-z][A-Za-z0-9-]*')


def call_grammar(format_: ToolFormat, tools: list[dict[str, Any]], *, several: bool) -> str:
    """GBNF that allows exactly a call of one of the tools (several: one after another)."""
    from ikpy.engine.gbnf import GrammarError
    from ikpy.engine.json_schema import literal, schema_to_gbnf

    rules, alternatives = [], []
    for i, tool in enumerate(tools):
        prefix = f"tool{i}-"
        try:
            rules.append(prefixed(schema_to_gbnf(tool.get("parameters") or {"type": "object"}), prefix))
        except GrammarError as error:
            raise bad_request(f"parameters of tool {tool['name']}: {error}") from None
        head = literal(f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": ')
        alternatives.append(f'{head} {prefix}root "}}"')
    repeated = f'({format_.root} "\\n"?)+' if several else format_.root
    return f"root ::= {repeated}\ncall ::= {' | '.join(alternatives)}\n" + "".join(rules)


def prefixed(rules: str, prefix: str) -> str:
    """GBNF text with a prefix before every rule name."""
    names = set(re.findall(r"^([A-Za-z][A-Za-z0-9-]*) ::=", rules, re.MULTILINE))
    return GRAMMAR_WORD.sub(lambda match: prefix + match[0] if match[0] in names else match[0], rules)
