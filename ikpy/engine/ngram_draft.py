"""Drafts from repetitions: what followed the last n tokens before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ikpy.engine.speculative import Drafter, SpeculativeParams

Key = tuple[int, ...]
N_VALUES = 4
POOL_SIZE = 1 << 22


class NgramIndex:
    """End positions of every n-gram of a growing text; a text that changed is indexed afresh."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.positions: dict[Key, list[int]] = {}
        self._tokens: list[int] = []

    def update(self, tokens: Sequence[int]) -> None:
        """Adds what is new in ``tokens``."""
        known = len(self._tokens)
        if known > len(tokens) or (known and tokens[known - 1] != self._tokens[-1]):
            self.positions, self._tokens, known = {}, [], 0
        self._tokens += tokens[known:]
        for end in range(max(known + 1, self.n), len(tokens) + 1):
            self.positions.setdefault(tuple(self._tokens[end - self.n : end]), []).append(end)

    def earlier(self, tokens: Sequence[int]) -> tuple[Key, list[int]]:
        """The last n-gram and where it ended before, oldest first."""
        key = tuple(tokens[-self.n :])
        return key, self.positions.get(key, [])[:-1]

    def following(self, end: int, length: int) -> list[int]:
        """Tokens behind a position."""
        return self._tokens[end : end + length]


class NgramSimple(Drafter):
    """The ``size_m`` tokens behind the last earlier occurrence of the last ``size_n``."""

    name = "ngram-simple"

    def __init__(self, params: SpeculativeParams) -> None:
        self.params = params
        self._index = NgramIndex(params.size_n)

    def begin(self, tokens: Sequence[int]) -> None:
        self._index = NgramIndex(self.params.size_n)

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        self._index.update(tokens)
        if len(tokens) < self.params.size_n:
            return []
        _, ends = self._index.earlier(tokens)
        return self._index.following(ends[-1], min(n_max, self.params.size_m)) if ends else []


class NgramMapKey(NgramSimple):
    """As ngram-simple for n-grams seen at least ``min_hits`` times; how far a draft held limits that key's next one."""

    name = "ngram-map-k"

    def __init__(self, params: SpeculativeParams) -> None:
        super().__init__(params)
        self._limits: dict[Key, int] = {}
        self._used: Key | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        super().begin(tokens)
        self._limits.clear()

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        self._index.update(tokens)
        if len(tokens) < self.params.size_n:
            return []
        key, ends = self._index.earlier(tokens)
        if len(ends) < self.params.min_hits:
            return []
        self._used = key
        return self._choose(ends, min(n_max, self._limits.get(key, self.params.size_m)))

    def _choose(self, ends: list[int], length: int) -> list[int]:
        return self._index.following(ends[-1], length)

    def accept(self, n_accepted: int) -> None:
        assert self._used is not None
        self._limits[self._used] = min(self.params.size_m, 2 * n_accepted + 1)


class NgramMapValues(NgramMapKey):
    """The most frequent of up to four continuations of an n-gram, if it stands out."""

    name = "ngram-map-k4v"

    def _choose(self, ends: list[int], length: int) -> list[int]:
        found = [self._index.following(end, length) for end in ends[-16 * N_VALUES :]]
        counts = Counter(tuple(f) for f in found if len(f) == length)
        best = counts.most_common(N_VALUES)
        if not best or best[0][1] < self.params.min_hits or (len(best) > 1 and best[0][1] < 2 * best[1][1]):
            return []
        return list(best[0][0])


class NgramPool:
    """Next token by the hash of the n tokens before it, in constant memory; shared by all sequences."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._next = np.full(POOL_SIZE, -1, np.int32)

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Takes in the tokens from ``start`` on."""
        for i in range(max(start, self.n), len(tokens)):
            self._next[hash(tuple(tokens[i - self.n : i])) % POOL_SIZE] = tokens[i]

    def follow(self, tokens: Sequence[int], n_max: int) -> list[int]:
        """Continues ``tokens`` while the pool knows how."""
        window = list(tokens[-self.n :])
        found: list[int] = []
        while len(window) == self.n and len(found) < n_max:
            token = int(self._next[hash(tuple(window)) % POOL_SIZE])
            if token < 0:
                break
            found.append(token)
            window = [*window[1:], token]
        return found


class NgramMod(Drafter):
    """Follows the shared pool; other sequences' texts help."""

    name = "ngram-mod"

    def __init__(self, pool: NgramPool) -> None:
        self._pool = pool
        self._learned = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._learned = 0

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        self._pool.learn(tokens, min(self._learned, len(tokens)))
        self._learned = len(tokens)
        return self._pool.follow(tokens, n_max)
