"""WordPiece."""

from __future__ import annotations

import functools
import sys
import unicodedata

import regex
from tokenizers import normalizers, pre_tokenizers

from ikpy.vocab.cache import WordCache
from ikpy.vocab.table import TokenTable, TokenType
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


_NORMALIZER = normalizers.BertNormalizer()
_CASED_NORMALIZER = normalizers.BertNormalizer(lowercase=False)
_CASED_SHARE = 0.01
_PRE_TOKENIZER = pre_tokenizers.BertPreTokenizer()
_MAX_WORD = 100


class WpmModel:
    """Tokenizer of fragments: normalise, split into words, take the longest token from the left.

    Words are those of Hugging Face's BertTokenizer, which the models were trained with. No key of a file says whether
    it keeps capitals and accents: it does where more than a hundredth of the vocabulary's words have capitals, for
    which others have no use. ``reference_words`` reproduces the reference, which keeps the first code point of a
    character's decomposition (Hangul loses its vowels), keeps combining marks that stand alone, and knows 30 code
    points that have a lower case only: words with capitals or such marks become the unknown token there.
    """

    def __init__(self, table: TokenTable, unknown: int | None, *, reference_words: bool):
        self._ids = table.ids
        self._unknown = unknown
        self._longest = max(map(len, table.texts), default=0)
        published = _cased_character if _is_cased(table) else _published_character
        self._normalise = _reference_character if reference_words else published
        self._max_word = sys.maxsize if reference_words else _MAX_WORD
        self._cache = WordCache(self._encode_word)

    def encode(self, fragment: str) -> list[int]:
        """Ids of a fragment without special tokens."""
        return self._cache.encode("".join(map(self._normalise, decode_structural(fragment))).split(" "))

    def _encode_word(self, word: str) -> list[int]:
        """Ids of a word: that of the unknown token where it is too long or no token fits at some place."""
        text = SPACE_SYMBOL + word
        out: list[int] = []
        pos = 0
        while word and pos < len(text):
            index, pos = self._longest_token(text, pos) if len(word) <= self._max_word else (None, 0)
            if index is None:
                return [] if self._unknown is None else [self._unknown]
            out.append(index)
        return out

    def _longest_token(self, text: str, start: int) -> tuple[int | None, int]:
        """The longest token at a place of a text and its end; None if there is none."""
        for end in range(min(len(text), start + self._longest), start, -1):
            index = self._ids.get(text[start:end])
            if index is not None:
                return index, end
        return None, start


@functools.lru_cache(maxsize=65536)
def _published_character(char: str) -> str:
    """What a character is in the stream of words: "" dropped, " " a word break.

    Marks are removed, so that the order which normalising a whole text gives them does not matter.
    """
    return _split_off(char, _NORMALIZER)


@functools.lru_cache(maxsize=65536)
def _cased_character(char: str) -> str:
    """The same for vocabularies with capitals."""
    return _split_off(char, _CASED_NORMALIZER)


def _split_off(char: str, normalizer: normalizers.Normalizer) -> str:
    if char == SPACE_SYMBOL:
        return REPLACEMENT  # in no token: it would begin a word in the middle of one
    return "".join(f" {c} " if _is_split_off(c) else c for c in normalizer.normalize_str(char))


def _is_cased(table: TokenTable) -> bool:
    """Whether the words of a vocabulary have capitals."""
    words = [text for text, kind in zip(table.texts, table.types, strict=True) if kind == TokenType.NORMAL]
    return sum(text != text.lower() and not text.endswith("]") for text in words) > _CASED_SHARE * len(words)


def _is_split_off(char: str) -> bool:
    return len(_PRE_TOKENIZER.pre_tokenize_str(f"a{char}")) > 1


@functools.lru_cache(maxsize=65536)
def _reference_character(char: str) -> str:
    """What a character is in the stream of words: "" dropped, " " a word break."""
    base = unicodedata.normalize("NFD", char)[0]
    if _SPACE.match(base):
        return " "
    if base == REPLACEMENT or _DROPPED.match(base):
        return ""
    lower = _reference_lower().get(base, base)
    return f" {lower} " if _ALONE.match(base) else lower
