"""Ids to text piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Collects the bytes of ids and gives out whole characters only; invalid bytes become U+FFFD."""

    def __init__(self, piece: Callable[[int], bytes]):
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, index: int) -> str:
        """Text that the id completes; "" while a character is unfinished."""
        return self._decoder.decode(self._piece(index))

    def flush(self) -> str:
        """Rest at the end of the sequence: an unfinished character becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
