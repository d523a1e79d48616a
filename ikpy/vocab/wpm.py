"""WordPiece (model semantics 8.6)."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable

import regex

from ikpy.vocab.cache import WordCache
from ikpy.vocab.table import TokenTable
from ikpy.vocab.text import REPLACEMENT, SPACE_SYMBOL, decode_structural

_CJK = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b920-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_SPACE = regex.compile(r"\p{White_Space}")
_ALONE = regex.compile(rf"\p{{P}}|[\p{{S}}&&[\x00-\x7e]]|[{_CJK}]", regex.V1)
# Unassigned code points stay and usually make their word unknown.
_DROPPED = regex.compile(r"[\p{C}--\p{Cn}]", regex.V1)

# The 30 code points the reference's lower-casing finds among its 1433: single pairs, then runs of pairs.
_REFERENCE_LOWER_PAIRS = {
    0x2C24: 0x2C54, 0x2C63: 0x1D7D, 0x2C6F: 0x0250, 0x2C7F: 0x0240, 0x10CAB: 0x10CEB, 0x10CAF: 0x10CEF,
}  # fmt: skip
_REFERENCE_LOWER_NEXT = (
    0x2C75, 0x2C90, 0x2C92, 0x2C94, 0x2C96, 0x2CCC, 0x2CCE, 0x2CD0, 0x2CD2, 0x2CDE, 0x2CED, 0xA648, 0xA64E,
    0xA652, 0xA654, 0xA658, 0xA65C, 0xA65E, 0xA660, 0xA664, 0xA66A, 0xA66C, 0xA68E, 0xA760,
)  # fmt: skip


@functools.cache
def _reference_lower() -> dict[str, str]:
    pairs = {chr(upper): chr(lower) for upper, lower in _REFERENCE_LOWER_PAIRS.items()}
    return pairs | {chr(upper): chr(upper + 1) for upper in _REFERENCE_LOWER_NEXT}


class WpmModel:
    """Tokenizer of fragments: normalise, split into words, take the longest token from the left.

    Lower-casing is Unicode's, as the vocabularies expect. ``reference_lowercase`` reproduces the reference,
    whose lower-casing knows 30 code points only and turns most words with capitals into the unknown token.
    """

    def __init__(self, table: TokenTable, unknown: int | None, reference_lowercase: bool):
        self._ids = table.ids
        self._unknown = unknown
        self._longest = max(map(len, table.texts), default=0)
        self._normalise = functools.lru_cache(maxsize=65536)(_normaliser(reference_lowercase))
        self._cache = WordCache(self._encode_word)

    def encode(self, fragment: str) -> list[int]:
        """Ids of a fragment without special tokens."""
        return self._cache.encode("".join(map(self._normalise, decode_structural(fragment))).split(" "))

    def _encode_word(self, word: str) -> list[int]:
        if not word:
            return []
        text = SPACE_SYMBOL + word
        out: list[int] = []
        pos = 0
        while pos < len(text):
            for end in range(min(len(text), pos + self._longest), pos, -1):
                index = self._ids.get(text[pos:end])
                if index is not None:
                    out.append(index)
                    pos = end
                    break
            else:
                return [] if self._unknown is None else [self._unknown]
        return out


def _normaliser(reference_lowercase: bool) -> Callable[[str], str]:
    """Function of one character: "" dropped, " " a word break, otherwise its text in the word stream."""

    def normalise(char: str) -> str:
        base = unicodedata.normalize("NFD", char)[0]
        if _SPACE.match(base):
            return " "
        if base == REPLACEMENT or _DROPPED.match(base):
            return ""
        lower = _reference_lower().get(base, base) if reference_lowercase else base.lower()[0]
        return f" {lower} " if _ALONE.match(base) else lower

    return normalise
