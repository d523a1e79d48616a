"""Drafts from statistics of short n-grams: of the text itself, of earlier texts, of a corpus (lookup caches).

A cache file lists n-grams: four int32 tokens (-1 in unused places behind the n-gram), int32 number of continuations,
then int32 pairs (token, count); little endian. It is the layout of llama.cpp's lookup programs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ikpy.engine.speculative import Drafter
from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.atomic import replacing

NGRAM_MAX = 4
STATIC_SIZE = 2
NO_TOKEN = -1
MAX_COUNT = (1 << 31) - 1
MOST_PAIRS = 1 << 20
"""Continuations of n-grams that earlier texts leave behind, each about 300 bytes."""
# Longer n-grams are trusted sooner: least count and least share of the best continuation, by n-gram length.
MIN_COUNT = {1: 2, 2: 2, 3: 1, 4: 1}
MIN_SHARE = {1: 0.66, 2: 0.5, 3: 0.5, 4: 0.5}

Ngrams = dict[tuple[int, ...], Counter[int]]


class NgramCache:
    """Counts of the tokens that followed n-grams of 1 to 4 tokens."""

    def __init__(self) -> None:
        self.counts: Ngrams = {}

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Counts the tokens from ``start`` on."""
        for i in range(max(start, 1), len(tokens)):
            for n in range(1, min(NGRAM_MAX, i) + 1):
                self.counts.setdefault(tuple(tokens[i - n : i]), Counter())[tokens[i]] += 1

    @property
    def n_pairs(self) -> int:
        """Continuations of all n-grams."""
        return sum(map(len, self.counts.values()))

    def best(self, tokens: Sequence[int], static: NgramCache | None = None) -> int | None:
        """Most frequent token behind the longest n-gram that is trusted; ties are decided by ``static``."""
        for n in range(min(NGRAM_MAX, len(tokens)), 0, -1):
            counter = self.counts.get(tuple(tokens[-n:]))
            if not counter:
                continue
            weights: Mapping[int, int] = static.counts.get(tuple(tokens[-STATIC_SIZE:]), {}) if static else {}
            token, count = max(counter.items(), key=lambda item: (item[1] * (1 + weights.get(item[0], 0)), item[1]))
            if count >= MIN_COUNT[n] and count >= MIN_SHARE[n] * counter.total():
                return token
        return None

    @classmethod
    def load(cls, path: str | os.PathLike[str], n_vocab: int) -> NgramCache:
        """Reads a cache file for a vocabulary of n_vocab tokens.

        Raises UsageError if it cannot be read, FileFormatError if it is damaged or of another vocabulary.
        """
        try:
            data = np.frombuffer(Path(path).read_bytes(), "<i4")
        except OSError as error:
            raise UsageError(f"cannot read lookup cache '{path}': {error.strerror}") from None
        except ValueError:
            raise FileFormatError(f"lookup cache '{path}' is damaged: its length is no multiple of 4") from None
        cache = cls()
        for ngram, pairs in _records(path, data):
            _check_tokens(path, n_vocab, *ngram, *pairs[:, 0].tolist())
            cache.counts.setdefault(ngram, Counter()).update({int(t): int(c) for t, c in pairs})
        return cache

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a cache file, replacing it as a whole. Raises UsageError if it cannot be written."""
        values: list[int] = []
        for key, counter in self.counts.items():
            values += [*key, *([NO_TOKEN] * (NGRAM_MAX - len(key))), len(counter)]
            for token, count in counter.items():
                values += [token, min(count, MAX_COUNT)]
        try:
            with replacing(path) as file:
                file.write(np.array(values, "<i4").tobytes())
        except OSError as error:
            raise UsageError(f"cannot write lookup cache '{path}': {error.strerror}") from None


def _records(path: object, data: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    at = 0
    while at < len(data):
        head = data[at : at + NGRAM_MAX + 1]
        n = int(head[-1]) if len(head) == NGRAM_MAX + 1 else -1
        end = at + NGRAM_MAX + 1 + 2 * n
        if n < 1 or end > len(data):
            raise FileFormatError(f"lookup cache '{path}' is damaged at byte {4 * at}")
        pairs = data[at + NGRAM_MAX + 1 : end].reshape(n, 2)
        ngram = tuple(int(t) for t in head[:NGRAM_MAX] if t != NO_TOKEN)
        if not ngram or (pairs[:, 1] < 1).any():
            raise FileFormatError(f"lookup cache '{path}' is damaged at byte {4 * at}")
        yield ngram, pairs
        at = end


def _check_tokens(path: object, n_vocab: int, *tokens: int) -> None:
    """Drafts of another vocabulary would end a run, or all requests that share a batch, long after the load."""
    lowest, highest = min(tokens), max(tokens)
    if lowest < 0 or highest >= n_vocab:
        wrong = highest if highest >= n_vocab else lowest
        raise FileFormatError(
            f"lookup cache '{path}' holds token {wrong}, the vocabulary has {n_vocab}: "
            "it is of another model or damaged"
        )


class EarlierTexts:
    """Counts of texts that have ended, shared by all sequences: at most ``n_most`` continuations, of the n-grams that
    occurred last."""

    def __init__(self, cache: NgramCache, n_most: int = MOST_PAIRS) -> None:
        self.cache = cache
        self._n_most = n_most
        self._n_pairs = cache.n_pairs

    def add(self, text: NgramCache) -> None:
        """Adds the counts of a text."""
        counts = self.cache.counts
        for key, counter in text.counts.items():
            known = counts.pop(key, Counter())
            self._n_pairs -= len(known)
            known.update(counter)
            self._n_pairs += len(known)
            counts[key] = known  # behind all others
        oldest = iter(counts)
        dropped = []
        while self._n_pairs > self._n_most:
            dropped.append(next(oldest))
            self._n_pairs -= len(counts[dropped[-1]])
        for key in dropped:
            del counts[key]


class CacheDraft(Drafter):
    """Follows the statistics of the text, then of earlier texts (dynamic), then of a corpus (static)."""

    name = "ngram-cache"

    def __init__(
        self, static: NgramCache | None = None, dynamic: EarlierTexts | None = None, dynamic_path: str | None = None
    ) -> None:
        self._text = NgramCache()
        self._static, self._dynamic, self._path = static, dynamic, dynamic_path
        self._learned = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._keep_text()
        self._learned = 0

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        self._text.learn(tokens, min(self._learned, len(tokens)))
        self._learned = len(tokens)
        window = list(tokens[-NGRAM_MAX:])
        found: list[int] = []
        while len(found) < n_max:
            token = self._next(window)
            if token is None:
                break
            found.append(token)
            window = [*window, token][-NGRAM_MAX:]
        return found

    def _next(self, window: list[int]) -> int | None:
        token = self._text.best(window, self._static)
        if token is None and self._dynamic:
            token = self._dynamic.cache.best(window, self._static)
        if token is None and self._static:
            token = self._static.best(window)
        return token

    def _keep_text(self) -> None:
        if self._dynamic is not None:
            self._dynamic.add(self._text)
        self._text = NgramCache()

    def save(self) -> None:
        self._keep_text()
        if self._path and self._dynamic is not None:
            self._dynamic.cache.save(self._path)
