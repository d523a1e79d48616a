"""Pieces of an answer divided by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ikpy.tools.stop_strings import overlap

if TYPE_CHECKING:
    from ikpy.server.tasks import Finished


@dataclass(frozen=True)
class Delta:
    """New output of one kind: "reasoning", "content", or "tool" with the call's number.

    The first delta of a call has its ``name`` and ``call_id``; ``text`` of a call is JSON text of its arguments.
    """

    kind: str
    text: str
    index: int = 0
    name: str | None = None
    call_id: str | None = None


def is_markup(text: str) -> bool:
    """Whether the beginning of a marker hardly stands for itself: one character may, or the beginning of a word."""
    shown = text.strip()
    return len(shown) > 1 and not shown[0].isalnum()


class AnswerReader:
    """Divides the text of one answer as it comes."""

    def __init__(self) -> None:
        self._buffer = ""
        self._cut = False
        """Whether a limit has ended the answer: what is begun then, and is neither text nor a call, is left out."""
        self._stop = ""

    def feed(self, text: str) -> list[Delta]:
        """Deltas that new text completes."""
        self._buffer += text
        return list(self._advance(final=False))

    def finish(self, *, cut: bool, stop: str = "") -> list[Delta]:
        """Deltas of what was held back, at the end of the answer; ``cut``: a limit has ended it; ``stop``: the stop
        string that has, which is no part of the text but may be the end of a call."""
        self._cut, self._stop = cut, stop
        return list(self._advance(final=True))

    def end(self, event: Finished) -> list[Delta]:
        """`finish` as an answer has ended."""
        return self.finish(cut=event.stopped_limit, stop=event.stopping_word)

    def _take(self, markers: Iterable[str], final: bool) -> str:
        """Text of the buffer that cannot be the beginning of a marker."""
        n_held = max((overlap(self._buffer, marker) for marker in markers), default=0)
        text, held = self._buffer[: len(self._buffer) - n_held], self._buffer[len(self._buffer) - n_held :]
        if not final:
            self._buffer = held
            return text
        self._buffer = ""
        return text if self._is_left_out(held) else text + held

    def _is_left_out(self, held: str) -> bool:
        """Whether the beginning of a marker at the end of an answer is no text."""
        return self._cut and is_markup(held)

    def _advance(self, *, final: bool) -> Iterator[Delta]:
        """Takes from the buffer what is complete, at the end of the answer all."""
        raise NotImplementedError
