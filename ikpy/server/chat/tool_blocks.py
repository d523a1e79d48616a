"""Tool calls that are read as a whole block between two markers: DeepSeek, Kimi, Llama 3."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ikpy.server.chat.call_grammar import deepseek_call, deepseek_plain_call, json_call, kimi_call
from ikpy.server.chat.tool_reading import CallPart, CallReader, ListedCalls, Rules, ToolFormat, parse_value

Call = tuple[str, str, str | None]
"""Name, arguments as JSON text, id."""

DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n(.*?)\n?```|([^\n<]+)<｜tool▁sep｜>(.*?))"
    r"\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)
KIMI_CALL = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([^\s<:]+)(:\d+)?\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)


class BlockCalls(CallReader):
    """Everything up to the closing marker; ``parse`` gives the calls, or nothing if the block is malformed."""

    def __init__(self, opening: str, closing: str, parse: Callable[[str], list[Call]]) -> None:
        self._opening, self._closing, self._parse = opening, closing, parse
        self._text = ""

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """The calls once the block is complete."""
        self._text += text
        block, found, rest = self._text.partition(self._closing)
        if not found and not final:
            return
        self.rest = rest
        calls = self._parse(block)
        if not calls:
            yield CallPart(raw=self._opening + block + found)
        for name, arguments, call_id in calls:
            yield CallPart(arguments, name, call_id)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(parse_value(text), dict)
    except ValueError:
        return False


def deepseek_calls(block: str) -> list[Call]:
    """Calls between markers, with or without a code block around the arguments."""
    found = [(m[1] or m[3], m[2] or m[4] or "") for m in DEEPSEEK_CALL.finditer(block)]
    return [(name.strip(), text.strip(), None) for name, text in found] if all(is_object(t) for _, t in found) else []


def kimi_calls(block: str) -> list[Call]:
    """Calls whose identifier ``functions.NAME:NUMBER`` carries the name."""
    found = list(KIMI_CALL.finditer(block))
    if not all(is_object(m[3]) for m in found):
        return []
    return [(m[1], m[3].strip(), f"functions.{m[1]}{m[2]}" if m[2] else None) for m in found]


DEEPSEEK_MARKERS = tuple(f"<｜tool▁{x}｜>" for x in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))


def deepseek_format(name: str, call: Callable[[str, Any, Rules], str], example: str) -> ToolFormat:
    """A format of the DeepSeek family, which differ in how one call is written."""
    opening, closing, begin, end = DEEPSEEK_MARKERS[:4]
    return ToolFormat(
        name,
        opening,
        lambda: BlockCalls(opening, closing, deepseek_calls),
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
    lambda: BlockCalls("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", kimi_calls),
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
LLAMA = ToolFormat(
    "llama", '{"name":', lambda: ListedCalls('{"name":', '{"name":'), "call", json_call(" ", "parameters"), r'"\n"?'
)
