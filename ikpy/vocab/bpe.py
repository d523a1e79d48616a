"""BPE: splitting, byte map and merges.

The merges run in the ``tokenizers`` package. It accepts only merges whose parts and result are tokens, and
drops characters that are not; the reference merges texts and looks tokens up at the end. So every text a
merge names, and every character of the alphabet, gets an id past the end of the vocabulary when it is no
token, and such ids are resolved to byte tokens afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from tokenizers import models

from ikpy.errors import FileFormatError
from ikpy.vocab.cache import WordCache
from ikpy.vocab.pretokenizers import PreTokenizer
from ikpy.vocab.split_rules import split_rule
from ikpy.vocab.table import TokenTable
from ikpy.vocab.text import SPACE_SYMBOL, byte_encode, byte_to_char, decode_structural


def _split_merges(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs by rank; a line is split at its first space at index >= 1, the first of equal lines counts.

    Lines with bytes that are not UTF-8 are left out: no text is ever divided into such parts.
    """
    pairs: dict[tuple[str, str], None] = {}
    for line in lines:
        at = line.find(" ", 1)
        if at < 0:
            raise FileFormatError(f"tokenizer.ggml.merges: {line!r} is not two parts with a space between")
        if _is_valid_text(line):
            pairs[line[:at], line[at + 1 :]] = None
    return list(pairs)


class _Merger:
    """Applies merges to one word; texts without a token come back as ids >= ``n_tokens``."""

    def __init__(self, table: TokenTable, pairs: list[tuple[str, str]], alphabet: Iterable[str]):
        self.n_tokens = len(table)
        ids = {text: index for text, index in table.ids.items() if _is_valid_text(text)}
        needed = set(alphabet)
        for left, right in pairs:
            needed.update((left, right, left + right))
        self._extra = sorted(needed.difference(ids))
        ids.update(zip(self._extra, itertools.count(self.n_tokens)))
        self._model = models.BPE(vocab=ids, merges=pairs, cache_capacity=0)

    def merge(self, word: str) -> list[int]:
        return [token.id for token in self._model.tokenize(word)]

    def text_without_token(self, index: int) -> str:
        return self._extra[index - self.n_tokens]


def _is_valid_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


class ByteLevelBpe:
    """Words are written with the GPT-2 byte map before merging."""

    def __init__(self, table: TokenTable, merges: Sequence[str], pre: PreTokenizer, reference_lowercase: bool):
        self._ids = table.ids
        self._ignore_merges = pre.ignore_merges
        self._rule = split_rule(pre.rule, reference_lowercase)
        self._merger = _Merger(table, _split_merges(merges), byte_to_char())
        self._cache = WordCache(self._encode_word)

    def encode(self, fragment: str) -> list[int]:
        """Ids of a fragment without special tokens."""
        return self._cache.encode(self._rule.split(decode_structural(fragment)))

    def _encode_word(self, word: str) -> list[int]:
        encoded = byte_encode(word)
        if self._ignore_merges and encoded in self._ids:
            return [self._ids[encoded]]
        out: list[int] = []
        for index in self._merger.merge(encoded):
            if index < self._merger.n_tokens:
                out.append(index)
            else:
                out += self._single_bytes(self._merger.text_without_token(index))
        return out

    def _single_bytes(self, text: str) -> list[int]:
        """Tokens of the single bytes of an encoded text; only its ASCII characters are one byte long."""
        return [self._ids[char] for char in text if char.isascii() and char in self._ids]


class EscapedBpe:
    """The ``gemma4`` variant: spaces become U+2581, words are lines, missing characters byte tokens."""

    def __init__(self, table: TokenTable, merges: Sequence[str], pre: PreTokenizer):
        self._ids = table.ids
        self._rule = split_rule(pre.rule)
        pairs = _split_merges(merges)
        self._alphabet = {text for text in table.ids if len(text) == 1 and _is_valid_text(text)}
        self._alphabet.update(char for pair in pairs for text in pair for char in text)
        self._merger = _Merger(table, pairs, self._alphabet)
        self._cache = WordCache(self._encode_word)

    def encode(self, fragment: str) -> list[int]:
        """Ids of a fragment without special tokens."""
        return self._cache.encode(self._rule.split(decode_structural(fragment).replace(" ", SPACE_SYMBOL)))

    def _encode_word(self, word: str) -> list[int]:
        if word.startswith("\n") and word in self._ids:
            return [self._ids[word]]
        out: list[int] = []
        # A character outside the alphabet takes part in no merge, so it separates what can merge.
        for known, chars in itertools.groupby(word, self._alphabet.__contains__):
            part = "".join(chars)
            out += self._encode_known(part) if known else self._byte_tokens(part)
        return out

    def _encode_known(self, part: str) -> list[int]:
        out: list[int] = []
        for index in self._merger.merge(part):
            if index < self._merger.n_tokens:
                out.append(index)
            else:
                out += self._byte_tokens(self._merger.text_without_token(index))
        return out

    def _byte_tokens(self, text: str) -> list[int]:
        names = (f"<0x{byte:02X}>" for byte in text.encode("utf-8"))
        return [self._ids[name] for name in names if name in self._ids]
