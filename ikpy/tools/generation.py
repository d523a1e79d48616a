"""Growing one sequence token by token: evaluation in batches, reuse of a common beginning, context shift."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Protocol

from ikpy.engine.batch import Batch
from ikpy.engine.prefix import PROMPT_TAIL
from ikpy.engine.sampling import NotANumberError, Sampler
from ikpy.errors import ResourceError
from ikpy.signals.held_interrupts import held_back

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ikpy.engine.media import MediaStore
    from ikpy.engine.sampler_parts import KnownMaxima
    from ikpy.engine.speculative import Speculator


class SequenceCells(Protocol):
    """The part of the KV cache that a growing sequence uses."""

    @property
    def can_shift(self) -> bool: ...

    @property
    def recurrent(self) -> object | None: ...

    @property
    def removable(self) -> int: ...

    def keep_checkpoint(self, seq_id: int) -> None: ...

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> object: ...

    def rewind(self, seq_id: int, length: int) -> int: ...

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> object: ...


class SequenceContext(Protocol):
    """The part of :class:`ikpy.engine.context.Context` that a growing sequence uses."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_ctx_seq(self) -> int: ...

    @property
    def n_batch(self) -> int: ...

    @property
    def max_uniform_tokens(self) -> int: ...

    @property
    def kv(self) -> SequenceCells: ...

    @property
    def moves_media(self) -> bool: ...

    @property
    def token_states(self) -> NDArray[np.float32] | None: ...

    @property
    def known_maxima(self) -> KnownMaxima | None: ...

    def decode(self, batch: Batch, *, copy: bool = True) -> NDArray[np.float32]: ...


class ContextFullError(ResourceError):
    """The context is full and old tokens may not or cannot be dropped."""


class GrowingSequence:
    """Sequence ``seq_id`` of a context and the tokens its cache holds.

    ``n_keep`` first tokens survive a context shift; ``shift`` allows shifts. ``speculator`` makes guesses; it sees all
    tokens. ``media``: of a context that reads pictures; they are dropped as a whole.
    """

    def __init__(
        self,
        context: SequenceContext,
        *,
        n_keep: int = 0,
        shift: bool = True,
        seq_id: int = 0,
        speculator: Speculator | None = None,
        media: MediaStore | None = None,
    ) -> None:
        self.context = context
        self.speculator = speculator
        self.n_keep = n_keep
        self.shift = shift
        self.seq_id = seq_id
        self.tokens: list[int] = []
        self.on_shift: Callable[[int], None] | None = None
        self._is_spoiled = False
        self._media = media
        self._turn = 0  # rotation position minus position of the next token

    @property
    def obstacle(self) -> str:
        """Why old tokens are not dropped when the context is full; empty if they are."""
        if not self.shift:
            return "context shift is off"
        if not self.context.kv.can_shift:
            return "this model's cache cannot be shifted"
        if not self._has_media or (self.context.moves_media and self.speculator is None):
            return ""
        what = "a drafter reads" if self.context.moves_media else "turns positions"
        return f"a text with pictures or sounds that {what} is not shifted"

    @property
    def _has_media(self) -> bool:
        return self._media is not None and self._media.has_media(self.tokens)

    def rewind(self, tokens: Sequence[int]) -> int:
        """Keeps the common beginning with ``tokens``, drops the rest from the cache; returns the kept length.

        Nothing is kept if window layers have dropped what the next token needs, or behind a NotANumberError. At least
        the last of ``tokens`` is left to evaluate, since its logits are needed.
        """
        if self._is_spoiled:  # tokens before the one that brought a NaN may have got it, too
            self.tokens.clear()
            self._is_spoiled = False
        common = 0
        for ours, theirs in zip(self.tokens, tokens, strict=False):
            if ours != theirs:
                break
            common += 1
        # Even if nothing is to go: an interrupted call may have left cells that no token stands for.
        common = min(common, max(0, len(tokens) - 1))
        if self._media is not None:
            common = self._media.kept(self.tokens, tokens, common)
        common = self.context.kv.rewind(self.seq_id, common)
        del self.tokens[common:]
        self._turn = self._media.turn(self.tokens) if self._media is not None else 0
        return common

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Evaluates ``tokens`` behind the present ones; logits float32 [n_vocab] of the last.

        They may be memory that the next evaluation overwrites. Raises ContextFullError if they do not fit and no shift
        can help.
        """
        if not len(tokens):
            raise ValueError("no tokens to evaluate")
        n = len(tokens) - PROMPT_TAIL if self.context.kv.recurrent else 0
        if n > 0:  # the next prompt of a conversation goes on from here
            self._feed(tokens[:n], last=False)
            self.context.kv.keep_checkpoint(self.seq_id)
            tokens = tokens[n:]
        return self._feed(tokens, last=True)[-1]

    def _feed(self, tokens: Sequence[int], *, last: bool) -> NDArray[np.float32]:
        """Logits float32 [1, n_vocab] of the last of the tokens, none unless `last`."""
        left = list(tokens)
        while left:
            n = self.context.n_batch if self._media is None else self._media.cut(left, self.context.n_batch)
            piece, left = left[:n], left[n:]
            self._make_room(len(piece))
            wanted = "last" if last and not left else "none"
            batch = Batch.single(piece, len(self.tokens), self.seq_id, wanted, self._turn)
            logits = self.context.decode(batch, copy=False)
            self.tokens += piece
            if self._media is not None:
                self._turn += self._media.turn(piece)
            self._show_states(len(piece))
        return logits

    def _make_room(self, n: int) -> None:
        n_ctx = self.context.n_ctx_seq
        if len(self.tokens) + n <= n_ctx:
            return
        if self.obstacle:
            remedy = "raise it with -c" if n_ctx == self.context.n_ctx else "the model knows no later positions"
            raise ContextFullError(f"the context of {n_ctx} tokens is full and {self.obstacle}; {remedy}")
        keep = min(self.n_keep, len(self.tokens))
        if self._media is not None:
            keep = self._media.kept_whole(self.tokens, keep, n_ctx - n)
        drop = max((len(self.tokens) - keep) // 2, len(self.tokens) + n - n_ctx)
        if self._media is not None and drop <= len(self.tokens) - keep:
            keep, end = self._media.whole(self.tokens, keep, keep + drop)
            drop = end - keep
        if drop > len(self.tokens) - keep:
            raise ContextFullError(
                f"{n} more tokens do not fit the context of {n_ctx} ({keep} are kept); raise it with -c"
            )
        if self.on_shift:
            self.on_shift(drop)
        kv, seq = self.context.kv, self.seq_id
        with held_back():  # a shift that is half done spoils what is written behind
            kv.seq_rm(seq, keep, keep + drop)
            kv.seq_add(seq, keep + drop, len(self.tokens), -drop)
            del self.tokens[keep : keep + drop]
            if self.speculator is not None:
                self.speculator.shift(keep, drop)

    def generate(
        self, sampler: Sampler, logits: NDArray[np.float32], eog: frozenset[int]
    ) -> Generator[int, None, None]:
        """Tokens drawn by ``sampler``, from ``logits`` on; the end token is given out last.

        A token is evaluated when the next one is asked for; with a speculator, together with guesses at those that
        follow. Whenever a token is given out, ``tokens`` holds those before it. Raises NotANumberError.
        """
        speculator = self.speculator
        if speculator is not None:
            speculator.begin(self.tokens)
        token = self._sample(sampler, logits)
        sampler.accept(token)
        yield token
        while token not in eog:
            draft = self._draft(token, speculator) if speculator else []
            rows = self._feed_draft(token, draft)
            first = len(self.tokens) - 1
            accepted = 0
            try:
                for row, guess in zip(rows, [*draft, None], strict=True):
                    token = self._sample(sampler, row)
                    sampler.accept(token)
                    accepted += token == guess
                    yield token
                    if token != guess or token in eog:
                        break
                    self.tokens.append(token)
            finally:
                self._end_draft(first, len(draft), accepted)

    def _sample(self, sampler: Sampler, logits: NDArray[np.float32]) -> int:
        try:
            return sampler.sample(logits, self.context.known_maxima)
        except NotANumberError:
            self._is_spoiled = True
            raise

    def _draft(self, token: int, speculator: Speculator) -> list[int]:
        """Guesses at what follows ``token``: as fit the context, and no more than are rounded as single tokens are and
        can be taken back."""
        room = min(self.context.n_ctx_seq - len(self.tokens), self.context.max_uniform_tokens) - 1
        return speculator.draft([*self.tokens, token], min(room, self.context.kv.removable))

    def _feed_draft(self, token: int, draft: list[int]) -> NDArray[np.float32]:
        """Evaluates the token and guesses behind it; logits float32 [1 + n guesses, n_vocab]."""
        self._make_room(1 + len(draft))
        batch = Batch.one(token, len(self.tokens), self.seq_id, self._turn)
        if draft:
            batch.add(draft, len(self.tokens) + 1, self.seq_id, "all", self._turn)
        logits = self.context.decode(batch, copy=False)
        self.tokens.append(token)
        return logits

    def _end_draft(self, first: int, n_draft: int, n_accepted: int) -> None:
        """Removes from the cache what was evaluated from position ``first`` on but is not part of the text."""
        if n_draft:
            self.context.kv.seq_rm(self.seq_id, len(self.tokens), -1)
        self._show_states(len(self.tokens) - first)
        if self.speculator is not None:
            self.speculator.accept(n_accepted)

    def _show_states(self, n: int) -> None:
        """Gives the drafters the states of the first n tokens of the last batch, the last ones of the text."""
        if self.speculator is not None and self.speculator.needs_states:
            assert self.context.token_states is not None
            self.speculator.observe(self.tokens, self.context.token_states[:n])
