"""Text of generated tokens: whole characters only, stop strings found across pieces."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ikpy.tools.stop_strings import overlap


class LineIndents:
    """Finds the first line behind a newline that begins with fewer than ``n_least`` blanks or tabs."""

    def __init__(self, n_least: int) -> None:
        self._n_least = n_least
        self._n_blanks: int | None = None
        """Those of the line so far; None behind them, and before the first newline."""

    def end(self, text: str) -> int | None:
        """Adds text; the place in it where such a line, which may be empty, goes on behind its blanks."""
        for at, letter in enumerate(text if self._n_least > 0 else ""):
            if self._n_blanks is not None and letter in " \t":
                self._n_blanks += 1
            elif self._n_blanks is not None and self._n_blanks < self._n_least:
                return at
            else:
                self._n_blanks = 0 if letter == "\n" else None
        return None


class TextStream:
    """Collects the bytes of tokens and decides how much of the text may be given out.

    Once ``stopping_word`` is set, the text ends before it. Text that may be the beginning of a stop string and
    unfinished characters are held back; invalid bytes become U+FFFD. ``is_outdented`` is set when a line behind the
    first begins with fewer than ``n_indent`` blanks, which are the end of the text.
    """

    def __init__(self, stops: Sequence[str], n_indent: int = 0) -> None:
        self.stopping_word: str | None = None
        self.is_outdented = False
        self._lines = LineIndents(n_indent)
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
            text = piece.decode("ascii")
        else:
            text = self._decoder.decode(piece)
            self._unfinished = bool(self._decoder.getstate()[0])
        end = self._lines.end(text)
        self.is_outdented = end is not None
        self._held += text[:end]
        return None if self._unfinished and not self.is_outdented else self._advance()

    def finish(self) -> str:
        """The rest, at the end of the generation."""
        if not self.is_outdented:
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
