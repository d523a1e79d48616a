"""Tool calls that are read as a whole block between two markers: DeepSeek, Kimi, Solar Open, Llama 3."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

from ikpy.engine.grammars import strict_json
from ikpy.server.chat.call_grammar import deepseek_call, deepseek_plain_call, json_call, kimi_call, solar_call
from ikpy.server.chat.listed_calls import ListedCalls
from ikpy.server.chat.tool_reading import CallPart, CallReader, Rules, ToolFormat, parse_value
from ikpy.tools.stop_strings import overlap

Call = tuple[str, str, str | None]
"""Name, arguments as JSON text, id."""

QUOTE_OR_ESCAPE = re.compile(r'"|\\.', re.DOTALL)
ARGUMENTS = r'((?:"(?:\\.|[^"\\])*"|[^"])*?)'
"""JSON, in whose texts a marker is text."""
DEEPSEEK_CALL = re.compile(
    rf"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n{ARGUMENTS}\n?```\s*"
    rf"|([^\n<]+)<｜tool▁sep｜>{ARGUMENTS})<｜tool▁call▁end｜>",
    re.DOTALL,
)
KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^\s<:]+)(:\d+)?\s*"
    rf"<\|tool_call_argument_begin\|>{ARGUMENTS}<\|tool_call_end\|>",
    re.DOTALL,
)
SOLAR_CALL = re.compile(
    rf"\s*<\|tool_call:begin\|>([^<]*)<\|tool_call:name\|>([^<]+)<\|tool_call:args\|>{ARGUMENTS}<\|tool_call:end\|>",
    re.DOTALL,
)


class Texts(Protocol):
    """Follows the texts within a block that grows."""

    def is_open(self, block: str, end: int) -> bool:
        """Whether a text has begun and not ended in front of a place, which lies behind that of the last call."""
        ...


class QuotedTexts:
    """Texts between two marks that mean nothing else."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._counted = self._n_quotes = 0

    def is_open(self, block: str, end: int) -> bool:
        self._n_quotes += block.count(self._quote, self._counted, end)
        self._counted = end
        return self._n_quotes % 2 == 1


class JsonTexts:
    """Texts of JSON."""

    def __init__(self) -> None:
        self._at = 0
        self._is_open = False

    def is_open(self, block: str, end: int) -> bool:
        for found in QUOTE_OR_ESCAPE.finditer(block, self._at, end):
            self._is_open ^= found[0] == '"'
        self._at = end
        return self._is_open


class BlockCalls(CallReader):
    """Everything up to the closing marker; ``parse`` gives the calls and what follows the last well-formed one.

    A marker within one of the ``texts`` closes nothing, unless the text has no end. ``needs_end``: without the marker,
    of which a stop string may be a part, there is no call, as nothing else tells that one is complete.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        parse: Callable[[str], tuple[list[Call], str]],
        texts: Texts | None = None,
        *,
        needs_end: bool = False,
    ) -> None:
        self._opening, self._closing, self._parse, self._texts = opening, closing, parse, texts
        self._needs_end = needs_end
        self._text = ""
        self._looked_at = 0

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """The calls once the block is complete."""
        self._text += text
        at = self._end()
        if at >= 0:
            yield from self._closed_at(at)
        elif final:
            yield from self._unclosed()

    def _closed_at(self, at: int) -> Iterator[CallPart]:
        """The calls in front of the closing marker, and text that is none."""
        block, self.rest = self._text[:at], self._text[at + len(self._closing) :]
        calls, behind = self._parse(block)
        yield from parts_of(calls)
        if not calls:
            yield CallPart(raw=self._opening + block + self._closing)
        elif behind.strip():
            yield CallPart(raw=behind + self._closing)

    def _unclosed(self) -> Iterator[CallPart]:
        """The calls of a block whose marker is missing, or cut off by a limit or a stop string."""
        if (at := self._text.find(self._closing)) >= 0:  # in a text without an end
            yield from self._closed_at(at)
            return
        text = self._text + self.stop
        at = text.find(self._closing)
        n_begun = len(self._closing) if at >= 0 else overlap(text, self._closing)
        block = text[: at if at >= 0 else len(text) - n_begun]
        calls, behind = ([], "") if self._needs_end and n_begun < 2 else self._parse(block)
        self.rest = ""
        yield from parts_of(calls)
        if not calls:
            yield CallPart(raw=self._opening + self._text)
        elif (behind := behind[: max(0, len(self._text) - len(block) + len(behind))]).strip():
            yield CallPart(raw=behind)

    def _end(self) -> int:
        """Where the marker is that closes the block; -1 if it has not come."""
        while (at := self._text.find(self._closing, self._looked_at)) >= 0:
            self._looked_at = at + 1
            if self._texts is None or not self._texts.is_open(self._text, at):
                return at
        self._looked_at = max(self._looked_at, len(self._text) - len(self._closing) + 1)
        return -1


def parts_of(calls: Iterable[Call]) -> Iterator[CallPart]:
    """Calls that are known as a whole."""
    for name, arguments, call_id in calls:
        yield CallPart(arguments, name, call_id)


def object_text(text: str) -> str | None:
    """The text of a JSON object, with null for numbers that JSON cannot write; None if it is none."""
    try:
        value = strict_json.WITHOUT_CONSTANTS.decode(text)
        if not isinstance(value, dict):
            return None
        return text if is_json(text) else json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        parse_value(text)
    except ValueError:
        return False
    return True


def one_by_one(pattern: re.Pattern[str], read: Callable[[re.Match[str]], Call], block: str) -> tuple[list[Call], str]:
    """Calls up to the first that does not match, or whose arguments are no object."""
    calls: list[Call] = []
    at = 0
    while found := pattern.match(block, at):
        name, written, call_id = read(found)
        arguments = object_text(written)
        if arguments is None:
            break
        calls.append((name, arguments, call_id))
        at = found.end()
    return calls, block[at:]


def deepseek_calls(block: str) -> tuple[list[Call], str]:
    """Calls between markers, with or without a code block around the arguments."""
    return one_by_one(DEEPSEEK_CALL, lambda m: ((m[1] or m[3]).strip(), (m[2] or m[4] or "").strip(), None), block)


def kimi_calls(block: str) -> tuple[list[Call], str]:
    """Calls whose identifier ``functions.NAME:NUMBER`` carries the name."""
    return one_by_one(KIMI_CALL, lambda m: (m[1], m[3].strip(), f"functions.{m[1]}{m[2]}" if m[2] else None), block)


def solar_calls(block: str) -> tuple[list[Call], str]:
    """Calls with their ids."""
    return one_by_one(SOLAR_CALL, lambda m: (m[2].strip(), m[3].strip(), m[1].strip() or None), block)


DEEPSEEK_MARKERS = tuple(f"<｜tool▁{x}｜>" for x in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))


def deepseek_format(name: str, call: Callable[[str, Any, Rules], str], example: str) -> ToolFormat:
    """A format of the DeepSeek family, which differ in how one call is written."""
    opening, closing, begin, end = DEEPSEEK_MARKERS[:4]
    return ToolFormat(
        name,
        opening,
        lambda: BlockCalls(opening, closing, deepseek_calls, JsonTexts()),
        f"calls @{{{closing}}}",
        call,
        markers=DEEPSEEK_MARKERS,
        example=f"{opening}{begin}{example}{end}{closing}",
    )


DEEPSEEK = deepseek_format("deepseek", deepseek_call, "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```")
DEEPSEEK_PLAIN = deepseek_format("deepseek-plain", deepseek_plain_call, "NAME<｜tool▁sep｜>ARGUMENTS")
KIMI = ToolFormat(
    "kimi",
    "<|tool_calls_section_begin|>",
    lambda: BlockCalls("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", kimi_calls, JsonTexts()),
    "calls @{<|tool_calls_section_end|>}",
    kimi_call,
    markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
)
SOLAR = ToolFormat(
    "solar",
    "<|tool_calls|>",
    lambda: BlockCalls("<|tool_calls|>", "<|calls|>", solar_calls, JsonTexts()),
    "calls",
    solar_call,
    markers=("<|tool_calls|>", *(f"<|tool_call:{x}|>" for x in ("begin", "name", "args", "end"))),
)
"""The closing marker ends the text."""
LLAMA = ToolFormat(
    "llama",
    '{"name":',
    lambda: ListedCalls('{"name":', '{"name":'),
    "call",
    json_call(" ", "parameters"),
    r'"\n"?',
    others={
        begin: partial(ListedCalls, begin, begin)
        for begin in ('{"type": "function", "name":', '{"type":"function","name":', '{ "name":', '{"name" :')
    },
)
