"""Tool calls as a JSON list, or as objects one after another, between markers: Granite, Phi-4-mini, Command R7B.

Arguments are given out as they come. What does not follow the format is given back as text, from the first object that
is no call; calls before it stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ikpy.server.chat.call_grammar import cohere_call, json_call
from ikpy.server.chat.tool_reading import (
    LONGEST_HEAD,
    ArgumentsScanner,
    CallPart,
    SteppedReader,
    ToolFormat,
    decoded,
    read_object,
)

STRING = r'"((?:[^"\\]|\\.)*)"'
HEAD = re.compile(
    rf'\{{\s*(?:"tool_call_id"\s*:\s*{STRING}\s*,\s*)?"(?:tool_)?name"\s*:\s*{STRING}\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*\{(?=\s*["}])'
)
"""An object up to the opening brace of its arguments, looked for in `LONGEST_HEAD` characters: a longer one is read as
a whole, and a name that never ends takes no more than linear time."""
GAP = r'(" " | "\n" " "{0,8})?'
"""GBNF of the blanks between parts of a list."""


class StreamedList(SteppedReader):
    """Calls behind ``opening``, of which ``prefix`` is part of the JSON text, up to ``closing`` ("": the list's end).

    Identifiers that count the calls of an answer (``tool_call_id``) are not kept: they come again in the next answer.
    """

    def __init__(self, opening: str, closing: str, prefix: str = "") -> None:
        self._closing = closing
        self._held = opening.removesuffix(prefix)
        self._text = prefix
        self._listed = False
        self._object = ArgumentsScanner()
        self._n_scanned = 0
        self._step = self._begin

    def _fail(self) -> Iterator[CallPart]:
        """Text that is no call; what follows it is read on as content."""
        if self._held:
            yield CallPart(raw=self._held)
        self.rest = self._text

    def _begin(self, final: bool) -> Iterator[CallPart]:
        """Waits for the list or its first object."""
        self._skip_blanks()
        if self._text:
            self._listed = self._text[0] == "["
            self._skip(int(self._listed))
            self._step = self._item
        elif final:
            yield from self._fail()

    def _item(self, final: bool) -> Iterator[CallPart]:
        """Waits for an object."""
        self._skip_blanks()
        if self._text[:1] == "{":
            self._object, self._n_scanned = ArgumentsScanner(), 1
            self._step = self._head
        elif self._text or final:
            yield from self._fail()

    def _head(self, final: bool) -> Iterator[CallPart]:
        """Waits for the arguments, or for the whole of an object whose fields come in another order."""
        head = HEAD.match(self._text, 0, LONGEST_HEAD) if self._n_scanned <= LONGEST_HEAD else None
        if head is not None:
            self._text, self._held = self._text[head.end() :], ""
            self._object, self._step = ArgumentsScanner(), self._arguments
            yield CallPart("{", decoded(head[2]))
            return
        self._object.feed(self._text[self._n_scanned :])
        self._n_scanned = len(self._text)
        if not self._object.ended:
            if final:
                self._skip(len(self._text))
                yield from self._fail()
            return
        end = len(self._text) - len(self._object.behind)
        whole = read_object(self._text[:end])
        if whole is None:
            self._skip(end)
            yield from self._fail()
        else:
            self._text, self._held, self._step = self._text[end:], "", self._behind_item
            yield CallPart(whole[1], whole[0])

    def _arguments(self, final: bool) -> Iterator[CallPart]:
        out = self._scanned()
        if out:
            yield CallPart(out)
        if self._object.ended:
            self._object, self._step = ArgumentsScanner(), self._tail

    def _tail(self, final: bool) -> Iterator[CallPart]:
        """Fields behind the arguments are left out."""
        self._scanned()
        if self._object.ended:
            self._step = self._behind_item
        yield from ()

    def _scanned(self) -> str:
        """Text of the object that is being read."""
        out = self._object.feed(self._text)
        self._text = self._object.behind
        return out

    def _behind_item(self, final: bool) -> Iterator[CallPart]:
        """Another object, or the end."""
        self._skip_blanks()
        if not self._text:
            return
        another = self._text[0] == ("," if self._listed else "{")
        if another or self._text[0] == "]":
            self._skip(int(self._listed))
        self._step = self._item if another else self._close
        yield from ()

    def _close(self, final: bool) -> Iterator[CallPart]:
        """Drops the closing marker, or what a limit left of it; a model may leave it out."""
        self._text = self._text.lstrip()
        if self._text.startswith(self._closing):
            self.rest = self._text[len(self._closing) :]
        elif not self._closing.startswith(self._text):
            self.rest = self._text
        yield from ()


def listed_format(name: str, opening: str, closing: str, *, bare: bool = False) -> ToolFormat:
    """A format of objects with name and arguments; ``bare``: one may stand between markers without a list."""
    end = f" @{{{closing}}}" if closing else ""
    listed = f'{GAP} "[" {GAP} calls {GAP} "]" {GAP}{end}'
    return ToolFormat(
        name,
        opening,
        lambda: StreamedList(opening, closing),
        f"({listed} | {GAP} call {GAP}{end})" if bare else listed,
        json_call('{"name": '),
        r'"\n"?' if bare else None,
        markers=tuple(marker for marker in (opening, closing) if marker),
        separator=f'"," {GAP}',
    )


GRANITE = listed_format("granite", "<|tool_call|>", "")
PHI = listed_format("phi", "<|tool_call|>", "<|/tool_call|>", bare=True)
FUNCTOOLS = ToolFormat(
    "functools",
    "functools[",
    lambda: StreamedList("functools[", "", "["),
    f'{GAP} calls {GAP} "]"',
    json_call('{"name": '),
    separator=f'"," {GAP}',
    others={" functools[": lambda: StreamedList(" functools[", "", "[")},
)
"""Firefunction writes a blank in front."""
NEMOTRON = listed_format("nemotron", "<TOOLCALL>", "</TOOLCALL>")
TOOL_CALLS = listed_format("tool-calls", "<tool_calls>", "</tool_calls>")
COHERE = ToolFormat(
    "cohere",
    "<|START_ACTION|>",
    lambda: StreamedList("<|START_ACTION|>", "<|END_ACTION|>"),
    f'{GAP} "[" {GAP} calls {GAP} "]" {GAP} @{{<|END_ACTION|>}}',
    cohere_call,
    markers=("<|START_ACTION|>", "<|END_ACTION|>"),
    separator=f'"," {GAP}',
)
