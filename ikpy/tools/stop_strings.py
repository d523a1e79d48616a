"""Cutting streamed text at stop strings without giving out the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of the text that is a beginning of the marker (not empty), but not all of it."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


def ends_in(text: str, n_new: int, stops: Sequence[str]) -> bool:
    """Whether one of ``stops`` (not empty) ends within the last ``n_new`` characters of the text."""
    return any(text.find(stop, max(0, len(text) - n_new - len(stop) + 1)) >= 0 for stop in stops)


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
        keep = max((overlap(self._held, stop) for stop in self.stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text
