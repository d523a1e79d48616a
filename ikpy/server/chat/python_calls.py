"""Tool calls of LFM2 in Python's syntax: ``[name(key="text", n=3)]`` between two markers, or JSON in place of it.

Brackets are followed here, to a limited depth; texts and numbers between them are read by Python's own ``ast``, which
never sees more than one literal: of what models write it could take any time.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ikpy.engine.grammars import strict_json
from ikpy.engine.grammars.gbnf import literal
from ikpy.engine.grammars.schema_counts import Pairs
from ikpy.server.chat.scanning import DEEPEST, behind_blanks, behind_comma
from ikpy.server.chat.tagged_values import Schemas, if_possible, listed, parameters_of, schemas_of, value_types
from ikpy.server.chat.tool_blocks import BlockCalls, Call
from ikpy.server.chat.tool_reading import Rules, ToolFormat, named_call

OPENING, CLOSING = "<|tool_call_start|>", "<|tool_call_end|>"
WORD = r"""[^\s()\[\]{}=,:'"]+"""
NAME = re.compile(rf"\s*({WORD})\s*\(")
KEY = re.compile(rf"({WORD})\s*=(?!=)")
JSON_BEGINS = re.compile(r"\s*(\[\s*)?\{")
OPENING_QUOTE = re.compile(r"""["]{3}|[']{3}|["']""")
TEXT_BEGINS = re.compile(r"""[=(\[{,:]\s*(["]{3}|[']{3}|["'])""")
QUOTE_OR_ESCAPE = re.compile(r"""\\.|["']""", re.DOTALL)
END_OF_VALUE = re.compile(r"\s*[,)\]}:]")
NUMBER = re.compile(r"[-+]?[0-9.][0-9A-Za-z_.]*(?:(?<=[eE])[-+][0-9_]+)?")
CONSTANT = re.compile(r"(?:True|true|False|false|None|null)\b")
CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
ESCAPE = re.compile(r"""\\(.)|["'\n\r\0]""", re.DOTALL)
ESCAPED = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}
KNOWN_ESCAPES = "\n\\'\"abfnrtv01234567xuUN"

# reading


def python_calls(schemas: Schemas, block: str) -> tuple[list[Call], str]:
    """Calls up to the first that is malformed; a list may lack its brackets."""
    if JSON_BEGINS.match(block):
        return json_calls(block)
    start = behind_blanks(block, 0)
    at = start + block.startswith("[", start)
    calls: list[Call] = []
    while name := NAME.match(block, at):
        try:
            arguments, end = _arguments(block, name.end(), list(schemas.get(name[1], ())))
        except ValueError:
            break
        calls.append((name[1], json.dumps(arguments, ensure_ascii=False), None))
        start = end
        at = behind_blanks(block, end)
        at += block.startswith(",", at)
    behind = block[start:]
    return calls, "" if behind.strip(" \t\r\n,]") == "" else behind


def json_calls(block: str) -> tuple[list[Call], str]:
    """Objects with name and arguments, which the models write if they are told to."""
    try:
        value = strict_json.WITHOUT_CONSTANTS.decode(block.strip())
    except (ValueError, RecursionError):
        return [], block
    calls = [call for item in (value if isinstance(value, list) else [value]) if (call := named_call(item)) is not None]
    return (calls, "") if not isinstance(value, list) or len(calls) == len(value) else ([], block)


def _arguments(text: str, at: int, names: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Arguments up to the closing bracket, and the place behind it; those without a name are the first of ``names``.

    Raises ValueError.
    """
    found: dict[str, Any] = {}
    at = behind_blanks(text, at)
    while not text.startswith(")", at):
        key = KEY.match(text, at)
        if key is None and len(found) >= len(names):
            raise ValueError("no name")
        name = names[len(found)] if key is None else key[1]
        if name in found:
            raise ValueError("a name that was there before")
        found[name], at = python_value(text, at if key is None else key.end())
        at = behind_comma(text, at, ")")
    return found, at + 1


def python_value(text: str, at: int, depth: int = 0) -> tuple[Any, int]:
    """The value of the literal at a place, as JSON has it, and the place behind it. Raises ValueError."""
    if depth > DEEPEST:
        raise ValueError("nested too deep")
    at = behind_blanks(text, at)
    if found := OPENING_QUOTE.match(text, at):
        return _string(text, found.end(), found[0])
    if found := CONSTANT.match(text, at):
        return CONSTANTS[found[0]], found.end()
    if found := NUMBER.match(text, at):
        return _number(found[0]), found.end()
    if text.startswith("{", at):
        return _mapping(text, at + 1, depth)
    if text.startswith("[", at):
        return _items(text, at + 1, "]", depth)
    if text.startswith("(", at):
        items, end = _items(text, at + 1, ")", depth)
        is_tuple = len(items) != 1 or text[at : end - 1].rstrip().endswith(",")
        return items if is_tuple else items[0], end
    raise ValueError("no literal")


def _string(text: str, at: int, quote: str) -> tuple[str, int]:
    """The text up to its closing quote, and the place behind that. Raises ValueError."""
    end = _closing_quote(text, at, len(text), quote)
    if end < 0:
        raise ValueError("a text without an end")
    return text_of(text[at:end]), end + len(quote)


def _closing_quote(text: str, at: int, end: int, quote: str) -> int:
    """Where the first quote is with the end of a value behind it, or -1.

    Templates of LFM2.5 show quotes within texts as they are.
    """
    for found in QUOTE_OR_ESCAPE.finditer(text, at, end):
        if text.startswith(quote, found.start()) and END_OF_VALUE.match(text, found.start() + len(quote), end):
            return found.start()
    return -1


class PythonTexts:
    """Follows the texts of a block as ``python_value`` reads them."""

    def __init__(self) -> None:
        self._at = 0
        self._quote = ""
        """That of the text that is open at this place."""

    def is_open(self, block: str, end: int) -> bool:
        while True:
            if not self._quote:
                begun = TEXT_BEGINS.search(block, self._at, end)
                if begun is None:
                    return False
                self._quote, self._at = begun[1], begun.end()
            closed = _closing_quote(block, self._at, end, self._quote)
            if closed < 0:
                self._at = end
                return True
            self._quote, self._at = "", closed + len(self._quote)


def text_of(written: str) -> str:
    """The text that stands between two quotes in Python; one with escapes that mean nothing stands for itself."""

    def escaped(found: re.Match[str]) -> str:
        if found[1] is None:
            return ESCAPED.get(found[0], "\\" + found[0])
        return found[0] if found[1] in KNOWN_ESCAPES else "/" if found[1] == "/" else "\\" + found[0]

    try:
        text = str(ast.literal_eval(f'"{ESCAPE.sub(escaped, written)}"'))
    except (SyntaxError, ValueError):
        return written
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # halves of a character, as JSON has them


def _number(written: str) -> int | float:
    try:
        value = ast.literal_eval(written)
    except SyntaxError:
        raise ValueError("no number") from None
    if not isinstance(value, (int, float)) or abs(value) == math.inf:
        raise ValueError("no number")
    str(value)  # a ValueError for thousands of digits, which cannot be written again
    return value


def _items(text: str, at: int, closing: str, depth: int) -> tuple[list[Any], int]:
    found = []
    at = behind_blanks(text, at)
    while not text.startswith(closing, at):
        value, at = python_value(text, at, depth + 1)
        found.append(value)
        at = behind_comma(text, at, closing)
    return found, at + 1


def _mapping(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = behind_blanks(text, at)
    while not text.startswith("}", at):
        key, at = python_value(text, at, depth + 1)
        at = behind_blanks(text, at)
        if isinstance(key, (list, dict)) or not text.startswith(":", at):
            raise ValueError("no key")
        value, at = python_value(text, at + 1, depth + 1)
        found[key if isinstance(key, str) else json.dumps(key)] = value
        at = behind_comma(text, at, "}")
    return found, at + 1


# writing


def written_value(value: Any) -> str:
    """A value as the templates of LFM2.5 show it."""
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def written_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls with name and arguments between the markers."""
    texts = []
    for call in calls:
        arguments = call["arguments"] if isinstance(call["arguments"], dict) else {}
        pairs = ", ".join(f"{key}={written_value(value)}" for key, value in arguments.items())
        texts.append(f"{call['name']}({pairs})")
    return f"{OPENING}[{', '.join(texts)}]{CLOSING}"


# grammars

ANY_NAME = "[A-Za-z_] [A-Za-z0-9_]{0,99}"
"""GBNF of the name of an argument that no schema names."""
ESCAPES = r'"\\" ( ["\x27\\nrt] | "u" [0-9a-fA-F]{4} )'
TEXT = rf'"\"" ( [^"\\\x00-\x1F] | {ESCAPES} )* "\"" | "\x27" ( [^\x27\\\x00-\x1F] | {ESCAPES} )* "\x27"'
LIMITS = frozenset({"pattern", "format", "minLength", "maxLength", "allOf"})
"""Keywords beside which a text is held to its schema, in JSON's quotes."""


def python_call(name: str, schema: Any, rules: Rules) -> str:
    """GBNF of a call: the name, then arguments in the order of the schema."""
    root, found = schema if isinstance(schema, dict) else {}, parameters_of(schema)
    named = []
    for key, value in found.properties.items():
        needed = key in found.required
        rule = if_possible(partial(_value_rule, value, root, rules), needed=needed)
        if rule is not None:
            named.append((f"{literal(f'{key}=')} {rule}", needed))
    more = None
    if found.more is not None:
        rule = if_possible(partial(_value_rule, found.more, root, rules))
        more = None if rule is None else rules.rule(f'{ANY_NAME} "=" {rule}')
    return f'{literal(f"{name}(")} {Pairs(named, more, SPACE).chained(rules.rule)} ")"'


def _value_rule(schema: Any, root: Any, rules: Rules) -> str:
    """GBNF of a value: texts in either quotes, words of Python, JSON within brackets."""
    choices = listed(schema)
    if choices:
        return f"({' | '.join(literal(text) for choice in choices for text in _spellings(choice))})"
    if isinstance(schema, dict) and not _lists(schema):
        types = value_types(schema)
        if types == {"string"} and not LIMITS & schema.keys():
            return rules.rule(TEXT)
        if types == {"boolean"}:
            return '("True" | "False")'
    return rules.schema(schema, root)


def _lists(schema: Collection[str]) -> bool:
    return "enum" in schema or "const" in schema


def _spellings(value: Any) -> list[str]:
    return [written_value(value)] + ([repr(value)] if isinstance(value, str) and repr(value)[0] == "'" else [])


SPACE = '" "?'


def lfm2_reader(functions: Sequence[Mapping[str, Any]] = ()) -> BlockCalls:
    """A reader that knows the functions."""
    return BlockCalls(OPENING, CLOSING, partial(python_calls, schemas_of(functions)), PythonTexts())


LFM2 = ToolFormat(
    "lfm2",
    OPENING,
    lfm2_reader,
    f'"[" calls "]" @{{{CLOSING}}}',
    python_call,
    markers=(OPENING, CLOSING),
    separator=f'"," {SPACE}',
    reader_of=lfm2_reader,
)


def is_lfm2(template: str) -> bool:
    """Whether a template shows tools as those of LFM2 do, of which some write no calls."""
    shows = "List of tools: " in template and "<|im_start|>" in template
    return shows or OPENING in template or "<|tool_list_start|>" in template
