"""Tool calls that are read as a whole JSON list or object: Mistral, Llama 3."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ikpy.engine.grammars import strict_json
from ikpy.server.chat.scanning import Brackets
from ikpy.server.chat.tool_reading import LONGEST_HEAD, CallPart, CallReader, named_call

ITEM = re.compile(r"\s*,?\s*(?=\{)")
BARE_HEAD = re.compile(r'\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("([^"\\]|\\.)*(\\$|"|$)|$)', re.DOTALL)
"""A call that stands there without a marker, up to its name, or the beginning of one."""
BARE_ARGUMENTS = (',"arguments":', ',"parameters":')


class ListedCalls(CallReader):
    """A JSON list of objects with name and arguments, or one object, read as a whole.

    ``prefix`` is the part of the opening marker that belongs to the JSON text; an object that begins with it is a call
    only if it has arguments.
    """

    def __init__(self, opening: str, prefix: str = "") -> None:
        self._opening = opening.removesuffix(prefix)
        self._text = prefix
        self._needs_arguments = bool(prefix)
        self._brackets = Brackets()
        self._is_closed(prefix)
        self._is_broken = False

    @property
    def may_be_text(self) -> bool:
        return self._needs_arguments and not begins_call(self._text)

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """The calls once the list is complete."""
        self._text += text
        closed = self._is_closed(text)
        if not final and (self._is_broken or not closed):
            return
        start = self._text.lstrip()
        try:
            value, end = strict_json.WITHOUT_CONSTANTS.raw_decode(start)
        except (ValueError, RecursionError):
            self._is_broken = True  # what follows cannot mend it
            if final:
                self.rest = ""
                yield from self._unfinished(start)
            return
        if self._needs_arguments and not (isinstance(value, dict) and {"arguments", "parameters"} & value.keys()):
            value = None
        calls = [named_call(item) for item in (value if isinstance(value, list) else [value])]
        self.rest = start[end:]
        if calls and all(calls):
            for call in calls:
                assert call is not None
                yield CallPart(call[1], call[0], call[2])
        else:
            yield CallPart(raw=self._opening + self._text[: len(self._text) - len(self.rest)])

    def _is_closed(self, text: str) -> bool:
        """Takes further text; whether it closes the outermost bracket."""
        return any([self._brackets.step(char) for char in text])

    def _unfinished(self, text: str) -> Iterator[CallPart]:
        """The complete calls of a list without an end, and the rest as text; all as text if there is none."""
        at, n_calls = 1, 0
        while text.startswith("[") and (item := ITEM.match(text, at)):
            try:
                value, end = strict_json.WITHOUT_CONSTANTS.raw_decode(text, item.end())
            except (ValueError, RecursionError):
                break
            call = named_call(value)
            if call is None:
                break
            yield CallPart(call[1], call[0], call[2])
            at, n_calls = end, n_calls + 1
        if rest := text[at:] if n_calls else self._opening + self._text:
            yield CallPart(raw=rest)


def begins_call(text: str) -> bool:
    """Whether an object without an end may be a call: a name, then arguments."""
    head = BARE_HEAD.match(text, 0, LONGEST_HEAD)
    behind = "" if head is None else "".join(text[head.end() : LONGEST_HEAD].split())
    return head is not None and any(behind.startswith(key) or key.startswith(behind) for key in BARE_ARGUMENTS)
