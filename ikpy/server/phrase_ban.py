"""Phrases that may not appear in an answer.

A token waits until its text cannot be the beginning of a banned phrase any more, or of a match of a banned pattern.
When one is complete, all of its tokens are taken back and the first one is made unlikely at its place.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ikpy.server.ban_patterns import BanPatterns, Progress
from ikpy.server.tasks import TokenProbability

MOST_PHRASES = 10_000
LONGEST_PHRASE = 500
"""Characters."""
BYTES_OF_CHARACTER = 4
MOST_TRIES = 100
"""Tokens that are tried at one place before a phrase stays: others wait meanwhile."""
LONGEST_WAIT = 100
MOST_LONGEST_WAIT = 1000
"""Tokens that may wait for the end of a pattern: the number unless a request says another, and its bound."""


@dataclass(frozen=True)
class BannedPhrases:
    """``phrases`` are made by `folded`; ``bias`` is added to the logits of the first ``n_tokens`` tokens of one that
    was taken back (-1: of all), at their places; at most ``n_rewinds`` are taken back in an answer (-1: any number).
    At most ``longest_wait`` tokens wait for the end of a match of ``patterns``."""

    phrases: tuple[str, ...]
    n_tokens: int = 1
    bias: float = -999.0
    n_rewinds: int = -1
    patterns: BanPatterns | None = None
    longest_wait: int = LONGEST_WAIT


@dataclass(frozen=True)
class HeldToken:
    """A token that waits, its text, and its probability if that is reported."""

    token: int
    piece: bytes
    probability: TokenProbability | None


def fold(text: str) -> str:
    """Lower case, character by character, so that places stay the same."""
    if text.isascii():
        return text.lower()
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)


def folded(phrases: Iterable[str]) -> tuple[str, ...]:
    """Phrases as `BannedPhrases` wants them: folded and sorted; empty ones are left out, and those that begin with
    another one, which is complete before them."""
    found: list[str] = []
    for phrase in sorted({fold(phrase) for phrase in phrases if phrase}):
        if not found or not phrase.startswith(found[-1]):
            found.append(phrase)
    return tuple(found)


def first_phrase(text: str, phrases: Sequence[str], longest: int) -> int:
    """Where the first phrase begins in a text; -1 for none. ``longest``: of the phrases.

    Of phrases that do not begin with each other only the last one that is not behind a text can begin it.
    """
    for at in range(len(text)):
        rest = text[at : at + longest]
        i = bisect_right(phrases, rest)
        if i and rest.startswith(phrases[i - 1]):
            return at
    return -1


class PhraseBan:
    """The tokens of one answer that wait, and what is banned at their places."""

    def __init__(self, banned: BannedPhrases) -> None:
        self.held: list[HeldToken] = []
        self._banned = banned
        self._longest = max(map(len, banned.phrases), default=0)
        self._search = _Search(banned.patterns, banned.longest_wait) if banned.patterns else None
        self._bans: dict[int, set[int]] = {}
        """Tokens by place, counted from the beginning of the answer."""
        self._released = b""
        """End of the text that waits no longer, as far as a phrase may begin there."""
        self._n_released = 0
        self._n_rewinds = 0

    def biased(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits of the next place with what is banned there."""
        tokens = self._bans.get(self._n_released + len(self.held))
        if not tokens:
            return logits
        row = logits.copy()
        row[list(tokens)] += np.float32(self._banned.bias)
        return row

    def add(self, held: HeldToken) -> None:
        """The next token."""
        self.held.append(held)
        if self._search:
            self._search.add(held.piece)

    def n_back(self, *, ended: bool) -> int:
        """Tokens to be taken back: from the one with the beginning of a banned phrase to the last; 0 for none.

        A phrase that begins in tokens which wait no longer, because it came about by another one that was taken back,
        cannot be taken back before the first waiting one. ``ended``: no token follows.
        """
        n_bytes = self._search.n_back(ended=ended) if self._search else 0
        return max(self._n_last(n_bytes), self._n_phrase())

    def _n_phrase(self) -> int:
        """Tokens from the beginning of a phrase on."""
        if not self._banned.phrases:
            return 0
        before, text = self._released.decode("utf-8", "surrogateescape"), self._text()
        both = before + text
        # Whatever ended before the last token has been found then: it was taken back, or all was released.
        first = max(0, len(both) - len(self.held[-1].piece) - BYTES_OF_CHARACTER - self._longest)
        found = first_phrase(fold(both[first:]), self._banned.phrases, self._longest)
        if found < 0:
            return 0
        start = first + found - len(before)
        return self._n_last(_n_bytes(text[start:])) if start >= 0 else len(self.held)

    def may_take_back(self, n: int) -> bool:
        """Whether another try at the place of the n-th last token makes sense."""
        place = len(self.held) - n
        tried = self._bans.get(self._n_released + place, set())
        if 0 <= self._banned.n_rewinds <= self._n_rewinds:
            return False
        return self.held[place].token not in tried and len(tried) < MOST_TRIES

    def take_back(self, n: int) -> None:
        """Forgets the last n tokens and bans the first of them."""
        place = len(self.held) - n
        taken, self.held = self.held[place:], self.held[:place]
        if self._search:
            self._search.take_back(n)
        for later in [key for key in self._bans if key > self._n_released + place]:
            del self._bans[later]  # found behind another beginning
        last = n if self._banned.n_tokens < 0 else min(n, self._banned.n_tokens)
        for i, item in enumerate(taken[:last]):
            self._bans.setdefault(self._n_released + place + i, set()).add(item.token)
        self._n_rewinds += 1

    def release(self, *, everything: bool) -> list[HeldToken]:
        """The tokens that need not wait any longer."""
        n = 0 if everything else self._n_waiting()
        free = self.held[: len(self.held) - n]
        self.held = self.held[len(free) :]
        for place in range(self._n_released, self._n_released + len(free)):
            self._bans.pop(place, None)
        self._n_released += len(free)
        if self._search:
            self._search.release(len(free), everything=everything)
        text = self._released + b"".join(item.piece for item in free)
        # Behind a phrase that stays, nothing before counts: it would be found again.
        self._released = b"" if everything else text[-BYTES_OF_CHARACTER * self._longest :]
        return free

    def _n_waiting(self) -> int:
        """The last tokens that may become a phrase or a match."""
        n = self._n_last(_n_bytes(self._beginning()))
        return max(n, self._n_last(self._search.n_waiting())) if self._search else n

    def _text(self) -> str:
        """Text of the waiting tokens; bytes of unfinished characters are surrogates."""
        return b"".join(item.piece for item in self.held).decode("utf-8", "surrogateescape")

    def _n_last(self, n_bytes: int) -> int:
        """Number of the last waiting tokens that hold the last bytes of their text."""
        n = 0
        while n_bytes > 0:
            n += 1
            n_bytes -= len(self.held[-n].piece)
        return n

    def _beginning(self) -> str:
        """The longest end of the text that may become a banned phrase."""
        text = self._text()
        whole = len(text) - _n_unfinished(text)
        low = fold(text[max(0, whole - self._longest) : whole])
        for n in range(len(low), 0, -1):
            if self._begins(low[len(low) - n :]):
                return text[whole - n :]
        return text[whole:]

    def _begins(self, text: str) -> bool:
        """Whether a banned phrase begins with a text."""
        at = bisect_left(self._banned.phrases, text)
        return at < len(self._banned.phrases) and self._banned.phrases[at].startswith(text)


def _n_unfinished(text: str) -> int:
    """Bytes (surrogates) at the end of a text that the next ones may make a character; others never become one."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    decoder.decode(text[-BYTES_OF_CHARACTER:].encode("utf-8", "surrogateescape"))
    return len(decoder.getstate()[0])


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


class _Search:
    """Searches for patterns in the waiting tokens. Answers are numbers of bytes at the end of their text, at most all:
    what begins before, because other tokens were taken back, cannot be taken back itself."""

    def __init__(self, patterns: BanPatterns, longest_wait: int) -> None:
        self._patterns = patterns
        self._longest_wait = longest_wait
        self._pieces: list[bytes] = []
        self._behind = [Progress()]
        """Searches before the first waiting token, and behind each."""
        self._found: int | None = None

    def add(self, piece: bytes) -> None:
        """The next token."""
        progress, self._found = self._patterns.feed(self._behind[-1], piece)
        self._pieces.append(piece)
        self._behind.append(progress)

    def n_back(self, *, ended: bool) -> int:
        """From the beginning of a match on; 0 without one."""
        found = self._patterns.end(self._behind[-1]) if ended and self._found is None else self._found
        return 0 if found is None else self._n_since(found)

    def n_waiting(self) -> int:
        """From the first place on where a match may begin."""
        begin = self._behind[-1].begin()
        n = 0 if begin is None else self._n_since(begin)
        if n > sum(map(len, self._pieces[-self._longest_wait :])):
            kept = self._pieces[len(self._pieces) - self._longest_wait // 2 :]
            self._restart(kept)
            begin = self._behind[-1].begin()
            n = 0 if begin is None else self._n_since(begin)
        return n

    def take_back(self, n: int) -> None:
        """Forgets the last n tokens."""
        del self._pieces[len(self._pieces) - n :], self._behind[len(self._behind) - n :]
        self._found = None

    def release(self, n: int, *, everything: bool) -> None:
        """The first n tokens wait no longer; ``everything``: no match begins before the next token."""
        del self._pieces[:n], self._behind[:n]
        if everything:
            self._behind[0] = replace(self._behind[0], threads=())

    def _restart(self, kept: list[bytes]) -> None:
        """Forgets matches that begin before the last tokens, which waited too long."""
        place = len(self._pieces) - len(kept)
        self._behind[place] = replace(self._behind[place], threads=())
        for i, piece in enumerate(kept, place + 1):
            self._behind[i], _ = self._patterns.feed(self._behind[i - 1], piece)

    def _n_since(self, byte: int) -> int:
        last = self._behind[-1]
        return min(last.at + len(last.pending) - byte, sum(map(len, self._pieces)))
