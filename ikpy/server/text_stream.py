"""Text of generated tokens: whole characters only, stop strings found across pieces."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ikpy.tools.stop_strings import overlap


class TextStream:
    """Collects the bytes of tokens and decides how much of the text may be given out.

    Once ``stopping_word`` is set, the text ends before it. Text that may be the beginning of a stop string and
    unfinished characters are held back; invalid bytes become U+FFFD.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopping_word: str | None = None
        self._stops = stops
        self._sent: list[str] = []
        self._held = ""
        """Whole characters that are not given out: no stop string begins before them."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = False

    @property
    def text(self) -> str:
        """All text so far, up to a stop string."""
        return "".join(self._sent) + self._held

    def feed(self, piece: bytes) -> str | None:
        """Adds a token's bytes; the text to give out, None while a character is unfinished."""
        if piece.isascii() and not self._unfinished:
            self._held += piece.decode("ascii")
        else:
            self._held += self._decoder.decode(piece)
            self._unfinished = bool(self._decoder.getstate()[0])
            if self._unfinished:
                return None
        return self._advance()

    def finish(self) -> str:
        """The rest, at the end of the generation."""
        self._held += self._decoder.decode(b"", final=True)
        out = self._advance()
        if self.stopping_word is None:
            out += self._take()
        return out

    def _advance(self) -> str:
        if not self._stops:
            return self._take()
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stopping_word = min(found, key=lambda pair: pair[0])
            self._held = self._held[:at]
            return self._take()
        return "" if any(overlap(self._held, stop) for stop in self._stops) else self._take()

    def _take(self) -> str:
        out, self._held = self._held, ""
        self._sent.append(out)
        return out
