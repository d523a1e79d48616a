"""SentencePiece-style BPE by score."""

from __future__ import annotations

import heapq

import regex

from ikpy.errors import FileFormatError
from ikpy.vocab.cache import WordCache
from ikpy.vocab.table import TokenTable
from ikpy.vocab.text import SPACE_SYMBOL, has_invalid_bytes, split_by_lead_byte, to_bytes


class SpmModel:
    """Tokenizer of fragments: merge the neighbours whose joined text is the best-scored token."""

    def __init__(self, table: TokenTable):
        if table.scores is None:
            raise FileFormatError("tokenizer.ggml.scores is missing; a 'llama' tokenizer needs a score per token")
        self._ids = table.ids
        self._scores: list[float] = table.scores.tolist()
        self._cut = _cut_pattern(table.texts)
        self._cache = WordCache(lambda piece: self._merge(list(piece)))

    def encode(self, fragment: str) -> list[int]:
        """Ids of a fragment without special tokens."""
        text = fragment.replace(" ", SPACE_SYMBOL)
        if has_invalid_bytes(text):
            return self._merge(split_by_lead_byte(text))
        return self._cache.encode([piece for piece in self._cut.split(text) if piece])

    def byte_token(self, byte: int) -> int | None:
        """Token of one byte: ``<0xHH>``, or the token whose text is that byte."""
        index = self._ids.get(f"<0x{byte:02X}>")
        return self._ids.get(bytes([byte]).decode("utf-8", "surrogateescape")) if index is None else index

    def _merge(self, symbols: list[str]) -> list[int]:
        out: list[int] = []
        for text in _merge_symbols(symbols, self._ids, self._scores):
            index = self._ids.get(text)
            if index is not None:
                out.append(index)
            else:
                out += [i for i in map(self.byte_token, to_bytes(text)) if i is not None]
        return out


def _cut_pattern(texts: list[str]) -> regex.Pattern[str]:
    """Zero-width places before U+2581 that no merge can cross.

    A merge needs a token holding both neighbours, so a place is safe when no token has that character
    directly before U+2581. It lets words be merged and cached one by one with the same result.
    """
    before = {char for text in texts for char in regex.findall(f"(.){SPACE_SYMBOL}", text, regex.S, overlapped=True)}
    members = "".join(regex.escape(char) for char in sorted(before | {SPACE_SYMBOL}))
    return regex.compile(f"(?<![{members}])(?={SPACE_SYMBOL})", regex.V1)


def _merge_symbols(symbols: list[str], ids: dict[str, int], scores: list[float]) -> list[str]:
    """Merge neighbours whose joined text is a token, highest score first, ties at the smaller index."""
    texts: list[str] = list(symbols)
    n_symbols = len(texts)
    following = list(range(1, n_symbols + 1))
    preceding = list(range(-1, n_symbols - 1))
    heap: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        if left < 0 or right >= n_symbols:
            return
        joined = texts[left] + texts[right]
        index = ids.get(joined)
        if index is not None:
            heapq.heappush(heap, (-scores[index], left, right, joined))

    for left in range(n_symbols - 1):
        offer(left, left + 1)
    while heap:
        _, left, right, joined = heapq.heappop(heap)
        # A side merged away is "", and a changed side no longer adds up to the candidate's length.
        if not texts[left] or not texts[right] or len(texts[left]) + len(texts[right]) != len(joined):
            continue
        texts[left], texts[right] = joined, ""
        following[left] = following[right]
        if following[left] < n_symbols:
            preceding[following[left]] = left
        offer(preceding[left], left)
        offer(left, following[left])
    return [text for text in texts if text]
