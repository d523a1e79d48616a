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

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
BEGINS = ("<|start|>", "<|channel|>")
"""What a message begins with, whether or not the one before it was ended."""
START = "<|start|>assistant"
BODY = MESSAGE, "<|start|>"
"""What stands around the text of a message; its own end may be missing."""
MARKERS = (MESSAGE, "<|constrain|>", *ENDS, *BEGINS)
LONGEST_HEADER = 500
"""Characters behind which something that began as a header is text."""
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
LONGEST_LEAD = max(map(len, LEADS))


class HarmonyReader(AnswerReader):
    """Divides the text of one answer as it comes: analysis is reasoning, calls go to tools, the rest is content.

    ``reasoning``: analysis is shown apart; ``inside``: the prompt ends in it.
    """

    def __init__(self, *, tools: bool, reasoning: bool, inside: bool = False) -> None:
        super().__init__()
        self._tools, self._reasoning = tools, reasoning
        self._header: str | None = None if inside else ""
        self._kind = "reasoning" if inside else "content"
        self._n_calls = 0

    def _advance(self, *, final: bool) -> Iterator[Delta]:
        while self._buffer:
            before = self._buffer, self._header
            yield from self._in_header(final) if self._header is not None else self._in_message(final)
            if (self._buffer, self._header) == before:
                return

    def _in_header(self, final: bool) -> Iterator[Delta]:
        """Waits for the whole header; an answer without any is content."""
        header, found, rest = self._buffer.partition(MESSAGE)
        begin = self._buffer[:LONGEST_LEAD]
        if not any(begin.startswith(lead) or (not found and lead.startswith(begin)) for lead in LEADS):
            self._header, self._kind = None, "content"
        elif len(header) > LONGEST_HEADER:
            self._buffer, self._header, self._kind = self._buffer[LONGEST_HEADER:], None, "content"
            yield Delta("content", header[:LONGEST_HEADER])
        elif found:
            self._buffer, self._header = rest, None
            yield from self._start(header)
        elif final:
            self._buffer = ""

    def _start(self, header: str) -> Iterator[Delta]:
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        if recipient and recipient[1] != "assistant" and self._tools:
            self._kind = "tool"
            yield Delta("tool", "", self._n_calls, recipient[1], random_id(""))
            self._n_calls += 1
        elif channel and channel[1] == "analysis" and self._reasoning:
            self._kind = "reasoning"
        else:
            self._kind = "content"

    def _in_message(self, final: bool) -> Iterator[Delta]:
        found = [(at, marker) for marker in (*ENDS, *BEGINS) if (at := self._buffer.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            text, self._buffer = self._buffer[:at], self._buffer[at:].removeprefix(marker if marker in ENDS else "")
            self._header = ""
        else:
            text = self._take((*ENDS, *BEGINS), final)
        if text and self._kind == "tool":
            yield Delta("tool", text, self._n_calls - 1)
        elif text:
            yield Delta(self._kind, text)
