"""Generated text, divided while it comes into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ikpy.server.chat.deltas import AnswerReader, Delta, is_markup
from ikpy.server.chat.harmony import HARMONY, HarmonyReader
from ikpy.server.chat.recipients import NO_CALLS, Recipient
from ikpy.server.chat.tags import Tags
from ikpy.server.chat.tool_reading import CallReader, ToolFormat
from ikpy.server.front import random_id


@dataclass(frozen=True)
class OutputFormat:
    """How the text of one answer is to be read.

    ``reasoning``: tags around reasoning, None to leave them in the content; ``in_reasoning``: the prompt ends inside
    them; ``tools``: how calls are written, None when there are none; ``harmony``: messages in channels; ``answer``:
    tags that may stand around the content and are left out; ``opened``: the prompt ends with what opens a call.
    """

    reasoning: Tags | None = None
    in_reasoning: bool = False
    tools: ToolFormat | None = None
    harmony: bool = False
    answer: Tags | None = None
    opened: bool = False

    def reader(self) -> OutputReader | HarmonyReader:
        """A reader of one answer."""
        if self.harmony:
            shown = self.reasoning is not None
            return HarmonyReader(tools=self.tools is HARMONY, reasoning=shown, inside=self.in_reasoning)
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
        self._behind_reasoning = "answer" if output.answer else "content"
        self._state = "reasoning" if output.in_reasoning else "start" if output.reasoning else self._behind_reasoning
        self._skip_blank = self._may_open_again = output.in_reasoning
        self._in_answer = False
        self._closings = (output.answer[1], "\n" + output.answer[1]) if output.answer else ()
        self._n_calls = 0
        self._readers = output.tools.readers if output.tools else {}
        self._call: CallReader | None = None
        if output.opened:
            self._state, self._call = "call", Recipient("", calls=output.tools is not NO_CALLS)
        self._steps = {
            "start": self._start,
            "reasoning": self._reasoning,
            "answer": self._answer,
            "content": self._content,
            "ending": self._ending,
            "call": self._in_call,
        }

    def _advance(self, *, final: bool) -> Iterator[Delta]:
        while True:
            state = self._state
            yield from self._steps[state](final)
            if self._state == state:
                return

    def _start(self, final: bool) -> Iterator[Delta]:
        assert self._format.reasoning is not None
        if self._opened(self._format.reasoning[0], "reasoning", self._behind_reasoning, final):
            self._skip_blank = True
        yield from ()

    def _answer(self, final: bool) -> Iterator[Delta]:
        """The opening tag of the content, if the model writes it."""
        assert self._format.answer is not None
        self._in_answer = self._opened(self._format.answer[0], "content", "content", final)
        self._skip_blank |= self._in_answer
        yield from ()

    def _opened(self, tag: str, inside: str, outside: str, final: bool) -> bool:
        """Drops a tag at the beginning of the text and goes on inside it, or outside if there is none."""
        text = self._buffer.lstrip()
        if text.startswith(tag):
            self._buffer, self._state = text[len(tag) :], inside
            return True
        if self._cut and tag.startswith(text) and is_markup(text):
            self._buffer = ""
        if final or not tag.startswith(text):
            self._state = outside
        return False

    def _blank_skipped(self) -> bool:
        """Drops blanks behind a tag; False while there is nothing else."""
        if self._skip_blank:
            self._buffer = self._buffer.lstrip()
            self._skip_blank = not self._buffer
        return not self._skip_blank

    def _reasoning(self, final: bool) -> Iterator[Delta]:
        assert self._format.reasoning is not None
        closing = self._format.reasoning[1]
        if not self._blank_skipped() or not self._opened_once(final):
            return
        text, found, rest = self._buffer.partition(closing)
        if found:
            self._buffer, self._state, self._skip_blank = rest, self._behind_reasoning, True
        else:
            text = self._take((closing,), final)
        if text:
            yield Delta("reasoning", text)

    def _opened_once(self, final: bool) -> bool:
        """Drops the opening tag if the model writes that of the prompt again; False while it may be doing so."""
        if not self._may_open_again:
            return True
        assert self._format.reasoning is not None
        opening = self._format.reasoning[0]
        if opening.startswith(self._buffer) and self._buffer != opening and not final:
            return False
        self._may_open_again = False
        if self._buffer.startswith(opening):
            self._buffer, self._skip_blank = self._buffer[len(opening) :], True
        return self._blank_skipped()

    def _content(self, final: bool) -> Iterator[Delta]:
        if not self._blank_skipped():
            return
        answer = self._format.answer
        states = dict.fromkeys(self._readers, "call")
        if answer and self._in_answer:
            states |= dict.fromkeys(self._closings, "ending")
        found = [(at, marker) for marker in states if (at := self._buffer.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            text, self._buffer, self._state = self._buffer[:at], self._buffer[at:], states[marker]
            if self._state == "call":
                self._buffer, self._call = self._buffer[len(marker) :], self._readers[marker]()
        else:
            text = self._take(states, final)
        if text:
            yield Delta("content", text)

    def _ending(self, final: bool) -> Iterator[Delta]:
        """A closing tag of the content: one if nothing but a call follows, else text."""
        assert self._format.answer is not None
        closing = next(tag for tag in self._closings if self._buffer.startswith(tag))
        opening = self._format.tools.opening if self._format.tools else ""
        behind = self._buffer[len(closing) :].lstrip()
        if opening and behind.startswith(opening):
            self._buffer, self._in_answer = behind, False
        elif behind and (final or not opening.startswith(behind)):
            self._buffer = self._buffer[len(closing) :]
            yield Delta("content", closing)
        elif final:
            self._buffer, self._in_answer = "", False
        else:
            return
        self._state = "content"

    def _is_left_out(self, held: str) -> bool:
        # A control token that begins a marker may also end an answer (GigaChat).
        markers = self._format.tools.markers if self._format.tools else ()
        return super()._is_left_out(held) or held.startswith(tuple(markers))

    def _in_call(self, final: bool) -> Iterator[Delta]:
        assert self._call is not None
        text, self._buffer = self._buffer, ""
        is_fragment = self._cut and not self._call.may_be_text
        self._call.stop, self._call.cut = self._stop, self._cut
        for part in self._call.feed(text, final):
            if part.name is not None:
                yield Delta("tool", part.arguments, self._n_calls, part.name, part.call_id or random_id(""))
                self._n_calls += 1
            elif part.raw:
                if not is_fragment:
                    yield Delta("content", part.raw)
            else:
                yield Delta("tool", part.arguments, self._n_calls - 1)
        if self._call.rest is not None:
            self._buffer = "" if is_fragment else self._call.rest
            self._state, self._skip_blank = "content", True
            self._call = None
