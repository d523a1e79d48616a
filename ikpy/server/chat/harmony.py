"""GPT-OSS answers: messages in channels (analysis, commentary, final), tool calls as messages to a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; a call is a message whose
header names `to=functions.NAME`, before or behind the channel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ikpy.server.chat.call_grammar import harmony_call
from ikpy.server.chat.deltas import AnswerReader, Delta
from ikpy.server.chat.tool_reading import CallPart, CallReader, ToolFormat
from ikpy.server.front import random_id
from ikpy.tools.stop_strings import overlap

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
MARKERS = ("<|channel|>", MESSAGE, "<|constrain|>", *ENDS)
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class NoCalls(CallReader):
    """Calls of this family are found in the headers of messages, not behind a marker in the text."""

    def feed(self, text: str, final: bool) -> Iterator[CallPart]:
        """Nothing is read here."""
        self.rest = text
        yield from ()


RECIPIENT_MARK = " to=functions."
HARMONY = ToolFormat(
    "harmony",
    "<|channel|>",
    NoCalls,
    "call",
    harmony_call,
    markers=MARKERS,
    lead=f'@{{<|channel|>}} "commentary{RECIPIENT_MARK}"',
    trigger=RECIPIENT_MARK,
)
LEADS = ("assistant", "to=", " to=", *MARKERS)
"""What a header may begin with."""


class HarmonyReader(AnswerReader):
    """Divides the text of one answer as it comes: analysis is reasoning, calls go to tools, the rest is content."""

    def __init__(self, *, tools: bool, reasoning: bool) -> None:
        super().__init__()
        self._tools, self._reasoning = tools, reasoning
        self._header: str | None = ""
        self._kind = "content"
        self._n_calls = 0

    def _advance(self, *, final: bool) -> Iterator[Delta]:
        while self._buffer:
            before = self._buffer
            yield from self._in_header(final) if self._header is not None else self._in_message(final)
            if self._buffer == before:
                return

    def _in_header(self, final: bool) -> Iterator[Delta]:
        """Waits for the whole header; an answer without any is content."""
        header, found, rest = self._buffer.partition(MESSAGE)
        if not found:
            if not any(lead.startswith(header[: len(lead)]) for lead in LEADS):
                self._header = None
            elif final:
                self._buffer = ""
            return
        self._buffer, self._header = rest, None
        yield from self._start(header)

    def _start(self, header: str) -> Iterator[Delta]:
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        if recipient and self._tools:
            self._kind = "tool"
            yield Delta("tool", "", self._n_calls, recipient[1], random_id(""))
            self._n_calls += 1
        elif channel and channel[1] == "analysis" and self._reasoning:
            self._kind = "reasoning"
        else:
            self._kind = "content"

    def _in_message(self, final: bool) -> Iterator[Delta]:
        found = [(at, marker) for marker in ENDS if (at := self._buffer.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            text, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
            self._header = ""
        else:
            keep = 0 if final else max(overlap(self._buffer, marker) for marker in ENDS)
            text, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        if text and self._kind == "tool":
            yield Delta("tool", text, self._n_calls - 1)
        elif text:
            yield Delta(self._kind, text)
