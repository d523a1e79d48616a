"""Terminal side of the chat program: text out without half characters, lines in, Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from ikpy.vocab import Vocab

YELLOW, GREEN, RESET = "\x1b[33m", "\x1b[1m\x1b[32m", "\x1b[0m"


class Console:
    """Standard output for text; standard input for lines of the user.

    ``color``: prompt and input are coloured when standard output is a terminal. ``multiline``: lines are collected
    until one ends with '/' or '\\'; otherwise a line ending with '\\' asks for another one. ``simple``: lines are not
    edited here but by the terminal, which takes up to 4,095 characters.
    """

    def __init__(
        self,
        vocab: Vocab,
        *,
        special: bool = False,
        color: bool = False,
        multiline: bool = False,
        simple: bool = False,
        out: TextIO | None = None,
        source: TextIO | None = None,
    ) -> None:
        self.out = out or sys.stdout
        self.source = source or sys.stdin
        self.multiline = multiline
        self.edit = not simple and self.source is sys.stdin and self.source.isatty() and self.out.isatty()
        self.color = color and self.out.isatty()
        self._decoder = vocab.stream_decoder(special)
        self._color = ""

    def set_color(self, color: str) -> None:
        """Switches the colour of the following text, where colours are on."""
        if self.color and color != self._color:
            self._color = color
            self.text(color or RESET)

    def text(self, text: str) -> None:
        """Writes text at once."""
        if text:
            self.out.write(text)
            self.out.flush()

    def token(self, token: int) -> str:
        """Writes what the token completes; returns it."""
        text = self._decoder.feed(token)
        self.text(text)
        return text

    def end(self) -> str:
        """Writes an unfinished character as U+FFFD; returns it."""
        text = self._decoder.flush()
        self.text(text)
        return text

    def read(self, prompt: str = "") -> str | None:
        """Input of the user behind a prompt, with the line ends the user meant; None at the end of the input.

        A last line ending with '/' has no line end; one ending with '\\' asks for another line (with ``multiline``
        the other way round: lines are read until one ends with either).
        """
        self.set_color(GREEN)
        try:
            return self._read(prompt)
        finally:
            self.set_color("")

    def _line(self, prompt: str) -> str:
        """A line of input with its end, empty at the end of the input."""
        if not self.edit:
            self.text(prompt)
            return self.source.readline()
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() its keys and history
        try:
            return input(prompt) + "\n"
        except EOFError:
            return ""

    def _read(self, prompt: str) -> str | None:
        lines: list[str] = []
        while True:
            line = self._line("" if lines else prompt)
            if not line:
                return "".join(lines) if lines else None
            if not self.source.isatty():
                self.text(line if line.endswith("\n") else line + "\n")
            line = line.removesuffix("\n")
            if line.endswith("/"):
                lines.append(line[:-1])
                return "".join(lines)
            if line.endswith("\\"):
                lines.append(line[:-1] + "\n")
                if self.multiline:
                    return "".join(lines)
                continue
            lines.append(line + "\n")
            if not self.multiline:
                return "".join(lines)


class Interrupt:
    """Whether Ctrl-C was pressed while text was generated; a second press ends the program."""

    def __init__(self) -> None:
        self.pressed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Collects Ctrl-C in :attr:`pressed` instead of raising KeyboardInterrupt."""
        self.pressed = False
        previous = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
