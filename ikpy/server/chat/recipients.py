"""Functionary 3.2: every part of an answer begins with its recipient, `>>>all` for what is said and `>>>NAME` for a
call, whose arguments are on the next lines. The prompt ends with the first `>>>`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ikpy.engine.grammars.gbnf import literal
from ikpy.server.chat.tool_reading import (
    LONGEST_HEAD,
    ArgumentsScanner,
    CallPart,
    Rules,
    SteppedReader,
    ToolFormat,
)

MARK = ">>>"
SAID = "all"
RECIPIENT = re.compile(r"([\w.-]+)\n")
CALLED = re.compile(r"([\w.-]+)\n\s*\{")
CALLED_BEGIN = re.compile(r"[\w.-]*(\n\s*)?$")


class Recipient(SteppedReader):
    """What follows the mark: the arguments of a call, or nothing but the name of all, whose text is read on as content.
    ``held``: the mark, if the answer has it; ``calls``: whether there are any."""

    def __init__(self, held: str = MARK, *, calls: bool = True) -> None:
        self._held = held
        self._calls = calls
        self._arguments = ArgumentsScanner()
        self._step = self._head

    @property
    def may_be_text(self) -> bool:
        return CALLED_BEGIN.match(self._text) is None

    def _head(self, final: bool) -> Iterator[CallPart]:
        """Waits for the recipient and, of a call, the brace that opens its arguments."""
        recipient, called = RECIPIENT.match(self._text), CALLED.match(self._text)
        if recipient is not None and recipient[1] == SAID:
            self.rest = self._text[recipient.end() :]
        elif called is not None and self._calls:
            self._text, self._step = self._text[called.end() :], self._body
            yield CallPart("{", called[1])
        elif final or len(self._text) > LONGEST_HEAD or (self.may_be_text and self._text.strip()):
            self._skip_blanks()  # they belong to the text behind the mark (doctests of Python)
            if self._held:
                yield CallPart(raw=self._held)
            self.rest = self._text

    def _body(self, final: bool) -> Iterator[CallPart]:
        """The arguments as they come."""
        text, self._text = self._text, ""
        out = self._arguments.feed(text)
        if out:
            yield CallPart(out)
        if self._arguments.ended:
            self.rest = self._arguments.behind


def recipient_call(name: str, schema: Any, rules: Rules) -> str:
    """A name and the arguments below it."""
    return f"{literal(name + chr(10))} {rules.schema(schema)}"


RECIPIENTS = ToolFormat(
    "functionary-recipients",
    MARK,
    Recipient,
    "calls",
    recipient_call,
    lead='">>>"?',
    separator='"\\n"? ">>>"',
    holds_begun=False,
)
NO_CALLS = replace(RECIPIENTS, reader=lambda: Recipient(calls=False))
"""How answers are read that have none: the recipient is left out."""


def has_recipients(template: str) -> bool:
    """Whether a template divides answers like this."""
    return MARK + SAID in template
