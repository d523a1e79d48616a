"""Pieces of an evaluated text that follow each other in a prompt with something left out between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ikpy.engine.prefix import common_prefix

MOST_PIECES = 100
"""Pieces that are looked for: each costs a pass over the text, and one over the cache."""


class Piece(NamedTuple):
    """``n_tokens`` tokens of an evaluated text from position ``start`` on."""

    start: int
    n_tokens: int


def find_pieces(text: Sequence[int], prompt: Sequence[int], n_same: int, n_min: int) -> list[Piece]:
    """The pieces of at least ``n_min`` tokens of a text which, in their order, continue the prompt behind the
    ``n_same`` tokens that both begin with. Each is the first one that fits; the search ends where none does, and at
    ``MOST_PIECES``."""
    haystack = np.array(text, np.int32).tobytes()
    found: list[Piece] = []
    start, at = n_same, n_same
    while at + n_min <= len(prompt) and len(found) < MOST_PIECES:
        start = _find(haystack, np.array(prompt[at : at + n_min], np.int32).tobytes(), start)
        if start < 0:
            break
        n = common_prefix(list(text[start:]), list(prompt[at:]))
        found.append(Piece(start, n))
        start += n
        at += n
    return found


def _find(haystack: bytes, needle: bytes, start: int) -> int:
    """First place of some 32-bit values among others from index ``start`` on, -1 if there is none."""
    place = 4 * start - 1
    while (place := haystack.find(needle, place + 1)) >= 0:
        if place % 4 == 0:
            return place // 4
    return -1
