"""Text of generated tokens: whole characters only, stop strings found across pieces."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ikpy.tools.stop_strings import overlap


class TextStream:
    """Collects the bytes of tokens and decides how much of the text may be given out.

    ``text`` is everything so far, cut before a stop string once ``stopping_word`` is set. Text that may be the
    beginning of a stop string and unfinished characters are held back; invalid bytes become U+FFFD.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.text = ""
        self.stopping_word: str | None = None
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._sent = 0
        self._waiting = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str | None:
        """Adds a token's bytes; the text to give out, None while a character is unfinished."""
        self._waiting += self._decoder.decode(piece)
        if self._decoder.getstate()[0]:
            return None
        return self._advance()

    def finish(self) -> str:
        """The rest, at the end of the generation."""
        self._waiting += self._decoder.decode(b"", final=True)
        out = self._advance()
        if self.stopping_word is None:
            out += self._take()
        return out

    def _advance(self) -> str:
        searched = max(0, len(self.text) - self._longest)
        self.text += self._waiting
        self._waiting = ""
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, searched)) >= 0]
        if found:
            at, self.stopping_word = min(found, key=lambda pair: pair[0])
            self.text = self.text[:at]
            return self._take()
        return "" if any(overlap(self.text, stop) for stop in self._stops) else self._take()

    def _take(self) -> str:
        out = self.text[self._sent :]
        self._sent = max(self._sent, len(self.text))
        return out
