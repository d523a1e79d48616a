"""Tool calls as invoke elements with an element per parameter: MiniMax-M2, DeepSeek V3.2 and V4, GigaChat 3.5.

Parameters are given out as they come. Strings stand there without quotes: the schema says what a value is, or an
attribute of the element where the format has one. Text that is no call is given back from where it begins; calls before
it stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ikpy.engine.grammars.gbnf import literal
from ikpy.server.chat.tagged_values import (
    Schemas,
    listed,
    schemas_of,
    tagged_call,
    takes_text,
    typed_value,
    value_types,
)
from ikpy.server.chat.tool_reading import LONGEST_HEAD, CallPart, Rules, SteppedReader, ToolFormat, value_or_text
from ikpy.tools.stop_strings import overlap

DSML = "｜DSML｜"
"""What DeepSeek V3.2 and V4 write behind the opening bracket of their tags: one token."""
GCML = "｜GCML｜"
"""The same of GigaChat 3.5."""


class InvokedCalls(SteppedReader):
    """Calls between the two tags ``outer``; ``prefix`` stands in the tags inside, behind their opening bracket."""

    def __init__(self, outer: tuple[str, str], prefix: str, schemas: Schemas) -> None:
        self._held, self._closing = outer
        self._schemas = schemas
        self._begins = f"<{prefix}invoke", f"<{prefix}parameter"
        self._ends = f"</{prefix}invoke>", f"</{prefix}parameter>"
        self._invoke = re.compile(rf'{self._begins[0]}\s+name="([^"<>]+)"\s*>')
        self._parameter = re.compile(rf'{self._begins[1]}\s+name="([^"<>]+)"(?:\s+string="(true|false)")?\s*>')
        self._any = False
        self._name = self._key = ""
        self._attribute: str | None = None
        self._n_values = 0
        self._step = self._outside

    def _unless_begun(self, final: bool, begin: str, end: str) -> Iterator[CallPart]:
        """Ends the reading if the text cannot become a tag that begins or ends here."""
        open_tag = ">" not in self._text and len(self._text) <= LONGEST_HEAD
        begun = open_tag and any(t.startswith(self._text) or self._text.startswith(t) for t in (begin, end))
        if begun and not final:
            return
        if begun and (self._any or self._n_values) and not self._held.strip():  # a limit cut the tag off
            self.rest = ""
            return
        if self._held and not (final and self._n_values):
            yield CallPart(raw=self._held)
        self.rest = self._text

    def _outside(self, final: bool) -> Iterator[CallPart]:
        """Between calls."""
        self._skip_blanks()
        invoked = self._invoke.match(self._text)
        if invoked:
            self._name, self._n_values, self._step = invoked[1], 0, self._inside
            self._skip(invoked.end())
        elif self._any and self._text.startswith(self._closing):
            self.rest = self._text[len(self._closing) :]
        else:
            yield from self._unless_begun(final, self._begins[0], self._closing)

    def _inside(self, final: bool) -> Iterator[CallPart]:
        """Between parameters; a call is one from its first parameter on, or from its end."""
        self._skip_blanks()
        parameter = self._parameter.match(self._text)
        if parameter:
            self._key, self._attribute = parameter[1], parameter[2]
            key = json.dumps(self._key, ensure_ascii=False) + ": " + ('"' if self._is_text() else "")
            yield CallPart(f", {key}") if self._n_values else CallPart(f"{{{key}", self._name)
            self._n_values += 1
            self._text, self._held, self._step = self._text[parameter.end() :], "", self._value
        elif (self._text + self.stop).startswith(self._ends[0]):
            yield CallPart("}") if self._n_values else CallPart("{}", self._name)
            self._text, self._held, self._step = self._text[len(self._ends[0]) :], "", self._outside
            self._any, self._n_values = True, 0
        else:
            yield from self._unless_begun(final, self._begins[1], self._ends[0])

    def _is_text(self) -> bool:
        """Whether the value can be nothing but a string."""
        if self._attribute is not None:
            return self._attribute == "true"
        return value_types(self._schemas.get(self._name, {}).get(self._key)) == {"string"}

    def _value(self, final: bool) -> Iterator[CallPart]:
        """A string as it comes, any other value once it is complete."""
        text, found, rest = self._text.partition(self._ends[1])
        if self._is_text():
            n_kept = 0 if found or final else overlap(text, self._ends[1])
            text, rest = text[: len(text) - n_kept], rest if found else text[len(text) - n_kept :]
            out = json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if found else "")
        elif found:
            out = json.dumps(self._json_value(text), ensure_ascii=False)
        else:
            return
        self._text = rest
        if out:
            yield CallPart(out)
        if found:
            self._step = self._inside

    def _json_value(self, text: str) -> Any:
        if self._attribute is None:
            return typed_value(text, self._schemas.get(self._name, {}).get(self._key))
        return value_or_text(text)


# grammars


def minimax_call(name: str, schema: Any, rules: Rules) -> str:
    """MiniMax-M2: values of all types stand as they are."""

    def pair(key: str, value: str, _: Any) -> str:
        return f'{literal("<parameter name=" + QUOTE)} {key} {literal(QUOTE + ">")} {value} "</parameter>" "\\n"?'

    call = tagged_call(f'{literal(f"<invoke name={quoted(name)}>")} "\\n"?', pair, "</parameter>", schema, rules)
    return f'{call} "</invoke>"'


def prefixed_call(prefix: str, name: str, schema: Any, rules: Rules) -> str:
    """Tags that begin with ``prefix``, and an attribute that says which values are strings."""

    def pair(key: str, value: str, schema: Any) -> str:
        kind = "true" if is_text(schema) else "false"
        if kind == "false" and (choices := listed(schema)):
            value = rules.schema({"enum": choices})
        name = f"{literal('parameter name=' + QUOTE)} {key} {literal(f'{QUOTE} string={quoted(kind)}>')}"
        return f'"<" @{{{prefix}}} {name} {value} "</" @{{{prefix}}} "parameter>" "\\n"?'

    head = f'"<" @{{{prefix}}} {literal(f"invoke name={quoted(name)}>")} "\\n"?'
    return f'{tagged_call(head, pair, f"</{prefix}parameter>", schema, rules)} "</" @{{{prefix}}} "invoke>"'


QUOTE = '"'


def quoted(name: str) -> str:
    """A value of an attribute."""
    return f'"{name}"'


def is_text(schema: Any) -> bool:
    """Whether `value_rule` lets a value be written without quotes."""
    choices = listed(schema)
    return takes_text(schema) or (bool(choices) and all(isinstance(item, str) for item in choices))


# formats

MINIMAX_TAGS = "<minimax:tool_call>", "</minimax:tool_call>"


def invoked_reader(outer: tuple[str, str], prefix: str, functions: Sequence[Mapping[str, Any]] = ()) -> InvokedCalls:
    """A reader that knows the functions."""
    return InvokedCalls(outer, prefix, schemas_of(functions))


MINIMAX = ToolFormat(
    "minimax",
    MINIMAX_TAGS[0],
    partial(invoked_reader, MINIMAX_TAGS, ""),
    f'"\\n"? calls "\\n"? @{{{MINIMAX_TAGS[1]}}}',
    minimax_call,
    markers=MINIMAX_TAGS,
    reader_of=partial(invoked_reader, MINIMAX_TAGS, ""),
)


def prefixed_format(name: str, prefix: str, block: str) -> ToolFormat:
    """Calls in an element ``block``, whose tags begin with ``prefix``."""
    tags = f"<{prefix}{block}>", f"</{prefix}{block}>"
    return ToolFormat(
        name,
        tags[0],
        partial(invoked_reader, tags, prefix),
        f'"\\n"? calls "\\n"? "</" @{{{prefix}}} "{block}>"',
        partial(prefixed_call, prefix),
        markers=(prefix,),
        lead=f'"<" @{{{prefix}}} "{block}>"',
        trigger=tags[0],
        reader_of=partial(invoked_reader, tags, prefix),
    )


DEEPSEEK_DSML = prefixed_format("deepseek-dsml", DSML, "function_calls")
DEEPSEEK_V4 = prefixed_format("deepseek-v4", DSML, "tool_calls")
GIGACHAT_GCML = prefixed_format("gigachat-gcml", GCML, "tool_calls")
