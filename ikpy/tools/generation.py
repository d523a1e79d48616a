"""Growing one sequence token by token: evaluation in batches, reuse of a common beginning, context shift."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from ikpy.engine.batch import Batch
from ikpy.errors import ResourceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ikpy.engine.sampling import Sampler


class SequenceCells(Protocol):
    """The part of the KV cache that a growing sequence uses."""

    @property
    def can_shift(self) -> bool: ...

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> object: ...

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> object: ...


class SequenceContext(Protocol):
    """The part of :class:`ikpy.engine.context.Context` that a growing sequence uses."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_batch(self) -> int: ...

    @property
    def kv(self) -> SequenceCells: ...

    def decode(self, batch: Batch) -> NDArray[np.float32]: ...


class ContextFullError(ResourceError):
    """The context is full and old tokens may not or cannot be dropped."""


class GrowingSequence:
    """Sequence ``seq_id`` of a context and the tokens its cache holds.

    ``n_keep`` first tokens survive a context shift; ``shift`` allows shifts.
    """

    def __init__(self, context: SequenceContext, *, n_keep: int = 0, shift: bool = True, seq_id: int = 0) -> None:
        self.context = context
        self.n_keep = n_keep
        self.shift = shift
        self.seq_id = seq_id
        self.tokens: list[int] = []
        self.on_shift: Callable[[int], None] | None = None

    def rewind(self, tokens: Sequence[int]) -> int:
        """Keeps the common beginning with ``tokens``, drops the rest from the cache; returns the kept length.

        At least the last of ``tokens`` is left to evaluate, since its logits are needed.
        """
        common = 0
        for ours, theirs in zip(self.tokens, tokens, strict=False):
            if ours != theirs:
                break
            common += 1
        common = min(common, max(0, len(tokens) - 1))
        if common < len(self.tokens):
            self.context.kv.seq_rm(self.seq_id, common, -1)
            del self.tokens[common:]
        return common

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Evaluates ``tokens`` behind the present ones; logits float32 [n_vocab] of the last.

        Raises ContextFullError if they do not fit and no shift can help.
        """
        if not len(tokens):
            raise ValueError("no tokens to evaluate")
        logits = None
        for start in range(0, len(tokens), self.context.n_batch):
            piece = list(tokens[start : start + self.context.n_batch])
            self._make_room(len(piece))
            last = start + len(piece) == len(tokens)
            batch = Batch.single(piece, len(self.tokens), self.seq_id, "last" if last else "none")
            logits = self.context.decode(batch)
            self.tokens += piece
        assert logits is not None
        return logits[-1]

    def _make_room(self, n: int) -> None:
        n_ctx = self.context.n_ctx
        if len(self.tokens) + n <= n_ctx:
            return
        if not self.shift or not self.context.kv.can_shift:
            reason = "context shift is off" if not self.shift else "this model's cache cannot be shifted"
            raise ContextFullError(f"the context of {n_ctx} tokens is full and {reason}; raise it with -c")
        keep = min(self.n_keep, len(self.tokens))
        drop = (len(self.tokens) - keep) // 2
        if drop < 1 or len(self.tokens) - drop + n > n_ctx:
            raise ContextFullError(
                f"{n} more tokens do not fit the context of {n_ctx} ({keep} are kept); raise it with -c"
            )
        if self.on_shift:
            self.on_shift(drop)
        kv, seq = self.context.kv, self.seq_id
        kv.seq_rm(seq, keep, keep + drop)
        kv.seq_add(seq, keep + drop, len(self.tokens), -drop)
        del self.tokens[keep : keep + drop]

    def generate(self, sampler: Sampler, logits: NDArray[np.float32], eog: frozenset[int]) -> Iterator[int]:
        """Tokens drawn by ``sampler``, from ``logits`` on; the end token is given out last.

        A token is evaluated when the next one is asked for.
        """
        while True:
            token = sampler.sample(logits)
            sampler.accept(token)
            yield token
            if token in eog:
                return
            logits = self.feed([token])
