"""What a sampler is put together from: its history and random numbers, and what it expects of grammars, of guidance and
of what knows something about logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import IkpyError


class NotANumberError(IkpyError):
    """A model computed NaN instead of logits.

    tokens: the sequence it was given, if that is known; where: the op that made the first one.
    """

    def __init__(self, tokens: Sequence[int] = (), where: str = "") -> None:
        self.tokens = tokens
        super().__init__(
            "the model's logits are not numbers (NaN): its file is damaged (--check-tensors looks for that), or its "
            "values are too large for the types that it was converted to"
            + (f"; the first value that is no number comes from {where}" if where else "")
        )


class KnownMaxima(Protocol):
    """Knows something about rows of logits float32 [n_vocab]; see :mod:`ikpy._native.steps`."""

    def block_maxima(self, logits: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """The largest of every 64 logits, NaN where one of them is."""
        ...

    def likeliest(self, logits: NDArray[np.float32]) -> int:
        """The first of the largest logits or the first NaN; -1 if that is not known."""
        ...


class TokenGrammar(Protocol):
    """Restricts the next token; see :mod:`ikpy.engine.grammars.grammar`."""

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        ...

    @property
    def ready(self) -> bool:
        """Whether no mask is being computed in another thread; while one is, all methods but `when_ready` wait."""
        ...

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls a function once ``ready`` is true."""
        ...

    def begin_mask(self) -> None:
        """Has `mask` computed in another thread, if it is not known."""
        ...

    def mask(self) -> NDArray[np.bool_]:
        """True for every token that may come next, [n_vocab]."""
        ...

    def accept(self, token: int) -> None:
        """Advances by ``token``."""
        ...

    def reset(self) -> None:
        """Returns to the start."""
        ...


class LogitGuidance(Protocol):
    """Changes logits before the samplers; see :mod:`ikpy.tools.guidance`."""

    def accept(self, token: int) -> None:
        """A token was generated."""
        ...

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Guided logits float32 [n_vocab]."""
        ...


class History:
    """Token ids in an array that grows by doubling: the last of them are a view, however long the text is."""

    def __init__(self) -> None:
        self._tokens = np.empty(256, np.int64)
        self.n = 0

    def append(self, token: int) -> None:
        """Adds a token at the end."""
        if self.n == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * self.n)
        self._tokens[self.n] = token
        self.n += 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end."""
        n = self.n + len(tokens)
        if n > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(n, 2 * len(self._tokens)))
        self._tokens[self.n : n] = tokens
        self.n = n

    def last(self, n: int) -> NDArray[np.int64]:
        """The last n tokens, or all of fewer, oldest first: a view, int64."""
        return self._tokens[max(0, self.n - n) : self.n]


class RandomNumbers:
    """Numbers from 0 to 1 of the 32-bit Mersenne Twister with its classic seeding, made in blocks: one at a time costs
    more than the draw it is for. Seeding takes long and waits for the first number; greedy samplers need none.

    seed: a number, or several for numbers that have nothing to do with those of one of them.
    """

    def __init__(self, seed: int | tuple[int, ...]) -> None:
        self._seed = seed
        self._generator: np.random.RandomState | None = None
        self._block: list[int] = []

    def next(self) -> float:
        """The next number, 0 and 1 included."""
        if not self._block:
            if self._generator is None:
                self._generator = np.random.RandomState(self._seed)
            self._block = self._generator.randint(0, 2**32, 64, dtype=np.uint32)[::-1].tolist()
        return self._block.pop() / 4294967295.0
