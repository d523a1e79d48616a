"""Pieces of an answer divided by kind."""

from __future__ import annotations

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
