"""What samplers learn from the tokens of a text, and unlearn with those that are taken back."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

MOST_TAKEN_BACK = 4096
"""Tokens at the end of a text that can be taken back: more than wait for the end of a banned phrase."""
State = TypeVar("State")


class Feedback(Generic[State]):
    """State of a sampler that depends on the tokens before; one that a grammar refused is none of them.

    state: what holds for the next token. ``drawn``: the last drawn token and what is learned from it, until it is
    accepted.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.drawn: tuple[int, float] | None = None
        self._before: deque[State] = deque(maxlen=MOST_TAKEN_BACK)

    def learned(self, value: float) -> State:
        """The state behind an accepted token."""
        raise NotImplementedError

    def accept(self, token: int) -> None:
        """A token was appended to the text; it counts if it is the drawn one."""
        self._before.append(self.state)
        if self.drawn and self.drawn[0] == token:
            self.state = self.learned(self.drawn[1])
        self.drawn = None

    def take_back(self, n: int) -> None:
        """The last n accepted tokens go."""
        for _ in range(min(n, len(self._before))):
            self.state = self._before.pop()
        self.drawn = None
