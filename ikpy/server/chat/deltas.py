"""Pieces of an answer divided by kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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


class AnswerReader:
    """Divides the text of one answer as it comes."""

    def __init__(self) -> None:
        self._buffer = ""

    def feed(self, text: str) -> list[Delta]:
        """Deltas that new text completes."""
        self._buffer += text
        return list(self._advance(final=False))

    def finish(self) -> list[Delta]:
        """Deltas of what was held back, at the end of the answer."""
        return list(self._advance(final=True))

    def _advance(self, *, final: bool) -> Iterator[Delta]:
        """Takes from the buffer what is complete, at the end of the answer all."""
        raise NotImplementedError
