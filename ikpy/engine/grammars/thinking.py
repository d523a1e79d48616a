"""A limit on the tokens of reasoning, kept like a grammar: behind the last one only the end of reasoning may come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ikpy.engine.sampler_parts import TokenGrammar

LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character."""


@dataclass(frozen=True)
class ThinkingLimit:
    """At most ``n_max`` tokens between ``opening`` and ``closing``, then the tokens ``end`` follow.

    ``inside``: the prompt has opened the reasoning; ``again``: it may be opened anywhere and more than once, and all
    parts count together, closing tags included.
    """

    n_max: int
    opening: str
    closing: str
    end: tuple[int, ...]
    inside: bool = False
    again: bool = False


class LimitedThinking:
    """Allows what ``grammar`` allows, and inside reasoning only its end once the limit is reached.

    ``piece`` gives the text of a token, control tokens included. The end waits for the last byte of a character and for
    a closing tag that has begun, and is not forced where the grammar forbids it.
    """

    def __init__(
        self, limit: ThinkingLimit, grammar: TokenGrammar | None, n_vocab: int, piece: Callable[[int], bytes]
    ) -> None:
        self._limit = limit
        self._grammar = grammar
        self._n_vocab = n_vocab
        self._piece = piece
        self._opening, self._closing = limit.opening.encode(), limit.closing.encode()
        self.reset()

    def reset(self) -> None:
        """Returns to the start."""
        if self._grammar:
            self._grammar.reset()
        self._n = 0
        self._text = b""
        self._end: deque[int] = deque()
        self._searching = True
        self._inside = False
        if self._limit.inside:
            self._enter()

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        if self._forced is not None:
            return token == self._forced
        return self._grammar is None or self._grammar.allows(token)

    @property
    def ready(self) -> bool:
        """Whether no mask is being computed in another thread."""
        return self._grammar is None or self._grammar.ready

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls a function once ``ready`` is true."""
        if self._grammar is None:
            call()
        else:
            self._grammar.when_ready(call)

    def begin_mask(self) -> None:
        """Has `mask` computed in another thread, if it is not known."""
        if self._grammar is not None and self._forced is None:
            self._grammar.begin_mask()

    def mask(self) -> NDArray[np.bool_]:
        """True for every token that may come next, [n_vocab]."""
        if self._forced is not None:
            only = np.zeros(self._n_vocab, np.bool_)
            only[self._forced] = True
            return only
        return np.ones(self._n_vocab, np.bool_) if self._grammar is None else self._grammar.mask()

    def accept(self, token: int) -> None:
        """Advances by ``token``."""
        forced = self._forced
        if self._grammar:
            self._grammar.accept(token)
        if forced is not None:
            self._end.popleft()
            if not self._end:
                self._leave()
        elif self._inside:
            self._think(self._piece(token))
        elif self._searching:
            self._search(self._piece(token))

    @property
    def _forced(self) -> int | None:
        """The only token that may come, None if there is a choice."""
        if not self._end or (self._grammar is not None and not self._grammar.allows(self._end[0])):
            return None
        return self._end[0]

    def _enter(self) -> None:
        self._inside, self._text = True, b""
        self._check()

    def _leave(self) -> None:
        self._inside, self._text = False, b""
        self._searching = self._limit.again

    def _think(self, piece: bytes) -> None:
        self._n += 1
        text = self._text + piece
        if self._closing in text:
            self._end.clear()
            self._leave()
            return
        self._text = text[-max(len(self._closing), LONGEST_CHARACTER) :]
        self._check()

    def _check(self) -> None:
        """The end has to come if the limit is reached."""
        if self._n < self._limit.n_max or self._end or ends_inside_character(self._text):
            return
        closes = any(self._text.endswith(self._closing[:n]) for n in range(1, len(self._closing)))
        if not closes or self._n >= self._limit.n_max + len(self._closing):
            self._end.extend(self._limit.end)

    def _search(self, piece: bytes) -> None:
        """Looks for the beginning of reasoning, by default at the beginning of the answer only."""
        self._text += piece
        if self._limit.again:
            found = self._opening in self._text
            self._text = self._text[-len(self._opening) :]
        else:
            text = self._text.lstrip()
            found = text.startswith(self._opening)
            self._searching = self._opening.startswith(text)
        if found:
            self._enter()


def ends_inside_character(text: bytes) -> bool:
    """Whether UTF-8 text ends with the beginning of a character."""
    for n in range(1, min(LONGEST_CHARACTER, len(text)) + 1):
        byte = text[-n]
        if byte & 0xC0 != 0x80:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return length > n
    return False
