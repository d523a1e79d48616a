"""Generated text, divided while it comes into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ikpy.server.chat.deltas import AnswerReader, Delta
from ikpy.server.chat.harmony import HARMONY, HarmonyReader
from ikpy.server.chat.tool_reading import CallReader, ToolFormat
from ikpy.server.front import random_id
from ikpy.tools.stop_strings import overlap

ReasoningTags = tuple[str, str]


@dataclass(frozen=True)
class OutputFormat:
    """How the text of one answer is to be read.

    ``reasoning``: tags around reasoning, None to leave them in the content; ``in_reasoning``: the prompt ends inside
    them; ``tools``: how calls are written, None when there are none; ``harmony``: messages in channels.
    """

    reasoning: ReasoningTags | None = None
    in_reasoning: bool = False
    tools: ToolFormat | None = None
    harmony: bool = False

    def reader(self) -> OutputReader | HarmonyReader:
        """A reader of one answer."""
        if self.harmony:
            return HarmonyReader(tools=self.tools is HARMONY, reasoning=self.reasoning is not None)
        return OutputReader(self)


@dataclass
class ChatMessage:
    """A complete answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    """Calls with "id", "name" and "arguments" (JSON text)."""

    def add(self, delta: Delta) -> None:
        """Appends a delta."""
        if delta.kind == "content":
            self.content += delta.text
        elif delta.kind == "reasoning":
            self.reasoning += delta.text
        else:
            if delta.name is not None:
                self.calls.append({"id": delta.call_id or "", "name": delta.name, "arguments": ""})
            self.calls[delta.index]["arguments"] += delta.text

    def openai(self) -> dict[str, Any]:
        """Object ``message`` of the OpenAI API."""
        out: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.calls:
            out["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                    "id": call["id"],
                }
                for call in self.calls
            ]
        return out


class OutputReader(AnswerReader):
    """Divides the text of one answer as it comes."""

    def __init__(self, output: OutputFormat) -> None:
        super().__init__()
        self._format = output
        self._state = "reasoning" if output.in_reasoning else "start" if output.reasoning else "content"
        self._skip_blank = output.in_reasoning
        self._n_calls = 0
        self._call: CallReader | None = None

    def _advance(self, *, final: bool) -> Iterator[Delta]:
        while True:
            state = self._state
            step = {"start": self._start, "reasoning": self._reasoning, "content": self._content, "call": self._in_call}
            yield from step[state](final)
            if self._state == state:
                return

    def _start(self, final: bool) -> Iterator[Delta]:
        assert self._format.reasoning is not None
        opening = self._format.reasoning[0]
        text = self._buffer.lstrip()
        if text.startswith(opening):
            self._buffer = text[len(opening) :]
            self._state, self._skip_blank = "reasoning", True
        elif final or not opening.startswith(text):
            self._state = "content"
        yield from ()

    def _blank_skipped(self) -> bool:
        """Drops blanks behind a tag; False while there is nothing else."""
        if self._skip_blank:
            self._buffer = self._buffer.lstrip()
            self._skip_blank = not self._buffer
        return not self._skip_blank

    def _reasoning(self, final: bool) -> Iterator[Delta]:
        assert self._format.reasoning is not None
        closing = self._format.reasoning[1]
        if not self._blank_skipped():
            return
        text, found, rest = self._buffer.partition(closing)
        if found:
            self._buffer, self._state, self._skip_blank = rest, "content", True
        else:
            text = self._take(closing, final)
        if text:
            yield Delta("reasoning", text)

    def _content(self, final: bool) -> Iterator[Delta]:
        if not self._blank_skipped():
            return
        tools = self._format.tools
        if tools is None:
            text, self._buffer = self._buffer, ""
        else:
            text, found, rest = self._buffer.partition(tools.opening)
            if found:
                self._buffer, self._state, self._call = rest, "call", tools.reader()
            else:
                text = self._take(tools.opening, final)
        if text:
            yield Delta("content", text)

    def _take(self, marker: str, final: bool) -> str:
        """Text that cannot be the beginning of the marker."""
        n = len(self._buffer) - (0 if final else overlap(self._buffer, marker))
        text, self._buffer = self._buffer[:n], self._buffer[n:]
        return text

    def _in_call(self, final: bool) -> Iterator[Delta]:
        assert self._call is not None
        text, self._buffer = self._buffer, ""
        for part in self._call.feed(text, final):
            if part.name is not None:
                yield Delta("tool", part.arguments, self._n_calls, part.name, part.call_id or random_id(""))
                self._n_calls += 1
            elif part.raw:
                yield Delta("content", part.raw)
            else:
                yield Delta("tool", part.arguments, self._n_calls - 1)
        if self._call.rest is not None:
            self._buffer, self._state, self._skip_blank = self._call.rest, "content", True
            self._call = None
