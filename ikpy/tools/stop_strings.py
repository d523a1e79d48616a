"""Cutting streamed text at stop strings without giving out the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on until one of ``stops`` appears; ``stopped`` names the one that did."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.stopped: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text so far may be given out."""
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self.stops]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if hits:
            at, self.stopped = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            text, self._held = self._held[:at], ""
            return text
        keep = max((self._overlap(stop) for stop in self.stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of ``stop`` that the held text ends with."""
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0
