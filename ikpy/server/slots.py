"""A slot: one sequence of the context, the tokens its cache holds, and the request it works on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.kv_cache import KVCacheFullError
from ikpy.engine.prefix import common_prefix
from ikpy.engine.sequence_state import unshare_sequence
from ikpy.engine.session import put_state, sequence_nbytes, take_state
from ikpy.server.phrase_ban import HeldToken, PhraseBan
from ikpy.server.prompt_cache import SavedText
from ikpy.server.tasks import (
    CompletionTask,
    Embedded,
    EmbeddingTask,
    Event,
    Failed,
    Finished,
    Piece,
    Task,
    Timings,
    TokenProbability,
)
from ikpy.server.text_stream import TextStream

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.engine.speculative import Speculator
    from ikpy.vocab import Vocab

LEAST_SHARED = 16
"""Tokens of a common beginning that are worth sharing between slots."""
TOO_LONG = "the request exceeds the available context size, try increasing it"
FULL = "context_length_exceeded: the request exceeds the available context size; context shift is disabled"


class RequestError(Exception):
    """The request of a slot cannot go on; the message is for the client."""


class SlotState(Enum):
    """What a slot is doing."""

    IDLE = 0
    PROMPT = 1
    GENERATING = 2


def truncate_prompt(tokens: list[int], n_ctx: int, n_keep: int) -> list[int]:
    """A prompt that is too long: its beginning and its end, blocks of half the rest left out (specification 10.6)."""
    n_block = max(1, (n_ctx - n_keep) // 2)
    erased = (len(tokens) - n_keep - n_block) // n_block
    return tokens[:n_keep] + tokens[n_keep + erased * n_block :]


class Slot:
    """Sequence ``id`` with room for ``n_ctx`` tokens. Used by the engine thread; others may read it."""

    def __init__(
        self,
        index: int,
        n_ctx: int,
        context: Context,
        vocab: Vocab,
        *,
        shift: bool,
        special: bool = False,
        speculator: Speculator | None = None,
    ) -> None:
        self.id = index
        self.n_ctx = n_ctx
        self.shift = shift and context.kv.can_shift
        self.tokens: list[int] = []
        self.task: Task | None = None
        self.last_task: Task | None = None
        self.state = SlotState.IDLE
        self.last_used = 0.0
        self.n_decoded = 0
        self.finished: Finished | None = None
        self._context = context
        self._kv = context.kv
        self._vocab = vocab
        self._special = special
        self.speculator = speculator
        self._reset()

    def _reset(self) -> None:
        self.prompt: list[int] = []
        self.n_cached = 0
        self.n_decoded = 0
        self.truncated = False
        self.pending: int | None = None
        self.finished = None
        self.draft: list[int] = []
        self.n_drafted = 0
        self.n_accepted = 0
        self.held: NDArray[np.float32] | None = None
        """Logits of the next token, which waits for the mask of a grammar."""
        self._expected: int | None = None
        """The guess at the token that is drawn next."""
        self._generated: list[int] = []
        self._probabilities: list[TokenProbability] = []
        self._unsent: list[TokenProbability] = []
        self._states: list[NDArray[np.float32]] = []
        self._text = TextStream(())
        self._ban: PhraseBan | None = None
        self._began = time.perf_counter()
        self._first = 0.0
        self._last_token = 0.0
        self.token_delay: float | None = None
        """Seconds between the last two tokens."""

    # --- requests ---------------------------------------------------------------------------------------------

    def similarity(self, tokens: Sequence[int]) -> float:
        """How much of a prompt the cache shares: 2 * common beginning / (prompt + cache)."""
        total = len(tokens) + len(self.tokens)
        return 2.0 * common_prefix(self.tokens, list(tokens)) / total if total else 0.0

    def start(self, task: Task) -> None:
        """Takes a request; `keep_prefix` decides what of the cache serves it. Raises RequestError if it cannot fit."""
        self._reset()
        self.task = self.last_task = task
        self.state = SlotState.PROMPT
        self.prompt = list(task.tokens)
        if isinstance(task, CompletionTask):
            self._text = TextStream(task.params.stop)
            self._ban = PhraseBan(task.params.banned) if task.params.banned else None
            self._fit_prompt(task)

    @property
    def may_reuse(self) -> bool:
        """Whether the request accepts tokens that are evaluated already."""
        return isinstance(self.task, CompletionTask) and self.task.params.cache_prompt

    def keep_prefix(self) -> None:
        """Keeps what the cache shares with the prompt; at least one token is left to evaluate."""
        keep = min(common_prefix(self.tokens, self.prompt), len(self.prompt) - 1) if self.may_reuse else 0
        self.n_cached = self.truncate(keep)

    def take_state(self) -> SavedText:
        """A copy of what the cache holds, and the drafters' caches."""
        drafts = self.speculator.take_states() if self.speculator is not None else ()
        return SavedText(take_state(self._context, self.id, self.tokens), drafts)

    @property
    def state_nbytes(self) -> int:
        """Bytes that `take_state` would copy."""
        drafts = self.speculator.state_nbytes if self.speculator is not None else 0
        return sequence_nbytes(self._context, self.id) + drafts

    def put_state(self, saved: SavedText) -> None:
        """Replaces the cache by a saved text; it is empty if there is no room."""
        try:
            put_state(self._context, self.id, saved.state)
        except KVCacheFullError:
            self.tokens = []
            return
        self.tokens = list(saved.tokens)
        if self.speculator is not None:
            self.speculator.put_states(saved.drafts)

    def adopt(self, other: Slot, n: int) -> None:
        """Replaces the cache by the first n tokens of another slot's, if no window has left them; both use the same
        cells."""
        if not self._kv.can_rewind(other.id, n):
            return
        self.truncate(0)
        self._kv.seq_cp(other.id, self.id, -1, n)
        self.tokens = other.tokens[: self._kv.rewind(self.id, n)]
        self._adopt_drafts(other)

    def _fit_prompt(self, task: CompletionTask) -> None:
        if len(self.prompt) < self.n_ctx:
            return
        if not self.shift:
            raise RequestError(TOO_LONG)
        self.prompt = truncate_prompt(self.prompt, self.n_ctx, self._n_keep(task))
        self.truncated = True

    def _n_keep(self, task: CompletionTask) -> int:
        """Tokens at the beginning that a context shift spares."""
        wanted = len(self.prompt) if task.params.n_keep < 0 else task.params.n_keep + int(self._vocab.add_bos)
        return min(wanted, self.n_ctx - 4)

    def truncate(self, n: int) -> int:
        """Keeps the first n cached tokens, none if window layers cannot go on from there; returns the number kept."""
        if n < len(self.tokens) or n == 0:
            n = self._kv.rewind(self.id, n)
            del self.tokens[n:]
        return n

    def release(self) -> None:
        """Ends the request; the cache stays for the next one, without guesses that were not judged."""
        if self.draft:
            self._kv.seq_rm(self.id, len(self.tokens), -1)
            self.draft = []
        self.task = None
        self.state = SlotState.IDLE
        self.pending = self.held = None
        self.last_used = time.monotonic()

    def emit(self, event: Event) -> None:
        """Hands an event to whoever waits for it."""
        if self.task is not None and not self.task.cancelled:
            self.task.sink(event)

    def fail(self, code: int, message: str) -> None:
        """Ends the request with an error."""
        self._end_with(Failed(self.task.index if self.task else 0, code, message))

    def _end_with(self, event: Event) -> None:
        """Last event of the request. The slot is idle before its client can know."""
        task = self.task
        self.release()
        if task is not None and not task.cancelled:
            task.sink(event)

    def share(self, donor: Slot) -> None:
        """Takes over the part of the donor's cache that the prompt begins with; the cells are stored once."""
        if not isinstance(self.task, CompletionTask) or not self.task.params.cache_prompt:
            return
        n = min(common_prefix(donor.tokens, self.prompt), len(self.prompt) - 1)
        if n >= len(self.tokens) + LEAST_SHARED and self._kv.can_rewind(donor.id, n):
            self._kv.seq_cp(donor.id, self.id, len(self.tokens), n)
            self.tokens = self.prompt[:n]
            self.n_cached = n
            self._adopt_drafts(donor)

    def _adopt_drafts(self, other: Slot) -> None:
        """The drafters learn what those of another slot know of the common text."""
        if self.speculator is not None and other.speculator is not None:
            self.speculator.adopt(other.speculator, len(self.tokens))

    def should_wait_for(self, other: Slot) -> bool:
        """Whether another slot is about to evaluate the next tokens of this slot's prompt."""
        ahead = (len(other.tokens), -other.id) > (len(self.tokens), -self.id)
        if (
            not (ahead and other.n_waiting)
            or not isinstance(self.task, CompletionTask)
            or not self.task.params.cache_prompt
        ):
            return False
        return common_prefix(other.prompt, self.prompt) >= max(len(self.tokens), len(other.tokens)) + LEAST_SHARED

    # --- evaluation -------------------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        """Prompt tokens that are not evaluated yet."""
        return len(self.prompt) - len(self.tokens) if self.state is SlotState.PROMPT else 0

    def take_prompt(self, n: int) -> list[int]:
        """The next n prompt tokens, which the caller evaluates."""
        piece = self.prompt[len(self.tokens) : len(self.tokens) + n]
        self.tokens += piece
        return piece

    def take_pending(self, n_max: int) -> list[int]:
        """The sampled token and at most ``n_max`` guesses at those behind it (``draft``), which the caller evaluates.

        Raises RequestError when the context is full.
        """
        assert self.pending is not None
        if len(self.tokens) + 1 >= self.n_ctx:
            self._shift_context()
        token, self.pending = self.pending, None
        self.tokens.append(token)
        self.draft = self._guess(min(n_max, self.n_ctx - len(self.tokens) - 1))
        self.n_drafted += len(self.draft)
        return [token, *self.draft]

    @property
    def _may_guess(self) -> bool:
        """Whether guesses serve the request: banned phrases are taken back token by token."""
        task = self.last_task
        wanted = isinstance(task, CompletionTask) and task.params.draft_n_max != 0
        return wanted and self.speculator is not None and self._ban is None

    def observe(self, first: int, states: NDArray[np.float32]) -> None:
        """Hidden states [n, n_embd] behind tokens from position ``first`` on; those beyond the text were not kept."""
        n = min(len(self.tokens) - first, len(states))
        if self._may_guess and n > 0:
            assert self.speculator is not None
            self.speculator.observe(self.tokens[: first + n], states[:n])

    def _guess(self, n_max: int) -> list[int]:
        if not self._may_guess:
            return []
        assert isinstance(self.task, CompletionTask) and self.speculator is not None
        params = self.task.params
        n_left = params.limit - self.n_decoded if params.limit >= 0 else n_max + 1
        n_max = min(n_max, n_left - 1, n_max if params.draft_n_max is None else params.draft_n_max)
        return self.speculator.draft(self.tokens, n_max, params.draft_n_min, params.draft_p_min)

    def sample_all(self, rows: NDArray[np.float32]) -> None:
        """Draws tokens from logits [1 + number of guesses, n_vocab] until one differs from its guess.

        What was evaluated behind the last kept token leaves the cache.
        """
        if self.speculator is None:
            self.sample(rows[0])
            return
        draft, self.draft = self.draft, []
        accepted_before = self.n_accepted
        try:
            for row, self._expected in zip(rows, [*draft, None], strict=True):
                self.sample(row)
                if self.task is None or self.held is not None:
                    break
                if self._expected is None or self.pending != self._expected:
                    break
                self.tokens.append(self._expected)
        finally:
            self._expected = None
            if draft:
                self._kv.seq_rm(self.id, len(self.tokens), -1)
            self.speculator.accept(self.n_accepted - accepted_before)

    def _shift_context(self) -> None:
        """Drops old tokens behind the kept beginning (specification 10.8)."""
        assert isinstance(self.task, CompletionTask)
        if not self.shift:
            raise RequestError(FULL)
        try:
            unshare_sequence(self._context, self.id)
        except KVCacheFullError as error:
            raise RequestError(str(error)) from None
        n_past = len(self.tokens)
        keep = min(self._n_keep(self.task), n_past)
        wanted = self.task.params.n_discard
        drop = max(1, min(wanted if wanted > 0 else (n_past - keep) // 2, n_past - keep))
        self._kv.seq_rm(self.id, keep, keep + drop)
        self._kv.seq_add(self.id, keep + drop, n_past, -drop)
        del self.tokens[keep : keep + drop]
        self.truncated = True
        if self.speculator is not None:
            self.speculator.shift(keep, drop)

    def add_states(self, states: NDArray[np.float32]) -> None:
        """Hidden states [n, n_embd] of evaluated tokens of an embedding request."""
        assert isinstance(self.task, EmbeddingTask)
        self._states.append(states)
        if self.n_waiting == 0:
            found, self._states = np.concatenate(self._states), []
            self._end_with(Embedded(self.task.index, found, len(self.prompt)))

    def sample(self, logits: NDArray[np.float32]) -> None:
        """Draws a token from logits [n_vocab], hands out its text, and ends the request when a stop rule holds."""
        task = self.task
        assert isinstance(task, CompletionTask)
        if self.state is SlotState.PROMPT:
            self.state = SlotState.GENERATING
            self._first = time.perf_counter()
            for token in self.prompt if task.params.penalty_prompt is None else task.params.penalty_prompt:
                task.sampler.accept(token, grammar=False)
            if self.speculator is not None:
                self.speculator.begin(self.prompt)
            if task.params.limit == 0:
                self._finish(task, "")
                return
        if self._ban is not None:
            self._sample_unbanned(task, self._ban, logits)
            return
        drawn = task.sampler.try_sample(logits, self._context.known_maxima)
        if drawn is None:
            self.held = logits.copy()
            return
        task.sampler.accept(drawn)
        self._add_token(task, drawn, self._probability(task, drawn, logits))

    @property
    def is_held(self) -> bool:
        """Whether there is nothing to do before a mask is computed."""
        task = self.task
        if self.held is None or not isinstance(task, CompletionTask) or task.cancelled:
            return False
        return not task.sampler.ready

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls a function, from any thread, when the mask that is waited for is there."""
        if self.held is not None and isinstance(self.task, CompletionTask):
            self.task.sampler.when_ready(call)

    def resume(self) -> None:
        """Draws the token that waited for a mask."""
        logits, self.held = self.held, None
        assert logits is not None
        self.sample(logits)

    def _sample_unbanned(self, task: CompletionTask, ban: PhraseBan, logits: NDArray[np.float32]) -> None:
        """Draws a token; one that completes a banned phrase is taken back with the phrase, and another is drawn."""
        while True:
            row = ban.biased(logits)
            token = task.sampler.sample(row)
            task.sampler.accept(token)
            piece = b"" if token in self._vocab.eog else self._piece(task, token)
            ban.add(HeldToken(token, piece, row, self._probability(task, token, row)))
            ends = token in self._vocab.eog or self._at_limit(task, len(ban.held))
            n = ban.n_back(ended=ends)
            if n > 1 and not self._kv.can_rewind(self.id, len(self.tokens) - n + 1):
                n = 1  # only the last token, which is not evaluated yet
            if n == 0 or not ban.may_take_back(n):
                break
            logits = ban.take_back(n)
            self.truncate(len(self.tokens) - n + 1)
            self.n_decoded += n
            task.sampler.take_back(n, [*self._generated, *(item.token for item in ban.held)])
            if self._at_limit(task, len(ban.held)):
                self._release(task, ban.release(everything=True))
                if self.task is task:
                    self._finish(task, "")
                return
        self._release(task, ban.release(everything=n > 0 or ends))
        if self.task is task:
            self.pending = token

    def _release(self, task: CompletionTask, tokens: list[HeldToken]) -> None:
        """Adds tokens that have waited to the answer, until a stop rule holds."""
        for item in tokens:
            if self.task is task:
                self._add_token(task, item.token, item.probability)

    def _piece(self, task: CompletionTask, token: int) -> bytes:
        """Text of a token."""
        return self._vocab.token_to_piece(token, self._special or token in task.params.preserved_tokens)

    def _add_token(self, task: CompletionTask, token: int, probability: TokenProbability | None) -> None:
        self.n_decoded += 1
        self.n_accepted += token == self._expected
        now = time.perf_counter()
        self.token_delay = now - self._last_token if self._last_token else None
        self._last_token = now
        self._generated.append(token)
        self.pending = token
        if probability is not None:
            self._probabilities.append(probability)
            self._unsent.append(probability)
        ended = token in self._vocab.eog
        text = self._text.feed(b"" if ended else self._piece(task, token))
        if ended or self._text.stopping_word is not None or self._at_limit(task):
            self._finish(task, text or "", eos=ended)
        elif text is not None:
            self._emit_piece(task, text)

    def _at_limit(self, task: CompletionTask, n_held: int = 0) -> bool:
        if 0 <= task.params.limit <= self.n_decoded + n_held:
            return True
        limit = task.params.t_max_predict_ms
        return 0 < limit < 1e3 * (time.perf_counter() - self._first)

    def _probability(self, task: CompletionTask, token: int, logits: NDArray[np.float32]) -> TokenProbability | None:
        """Probabilities of the token and the most likely ones, before or after the samplers; None if not wanted."""
        n = task.params.n_probs
        if n <= 0:
            return None
        if task.params.post_sampling_probs:
            ids, p = task.sampler.last_ids.astype(np.int64), task.sampler.last_probabilities
        else:
            ids, p = np.arange(len(logits), dtype=np.int64), probabilities(logits, task)
        order = largest(p, n)
        at = np.flatnonzero(ids == token)
        own = float(p[at[0]]) if len(at) else 0.0
        return TokenProbability(token, own, tuple((int(ids[i]), float(p[i])) for i in order))

    def _emit_piece(self, task: CompletionTask, text: str) -> None:
        if not task.params.stream:
            return
        unsent, self._unsent = tuple(self._unsent), []
        timings = self.timings() if task.params.timings_per_token else None
        self.emit(Piece(task.index, self.id, text, unsent, timings, len(self.prompt), self.n_cached))

    def _finish(self, task: CompletionTask, text: str, *, eos: bool = False) -> None:
        """Last piece and end of the request. A stop string in the text goes before the end token."""
        text += self._text.finish() if self._text.stopping_word is None else ""
        if self.n_decoded:
            self._emit_piece(task, text)
        word = self._text.stopping_word
        self.finished = Finished(
            index=task.index,
            id_slot=self.id,
            text=self._text.text,
            tokens=tuple(self._generated),
            n_prompt=len(self.prompt),
            n_cached=self.n_cached,
            n_decoded=self.n_decoded,
            n_past=len(self.tokens),
            truncated=self.truncated,
            stopped_eos=eos and word is None,
            stopped_word=word is not None,
            stopped_limit=not eos and word is None,
            stopping_word=word or "",
            probabilities=tuple(self._probabilities),
            timings=self.timings(),
        )
        self._end_with(self.finished)

    # --- reports ----------------------------------------------------------------------------------------------

    def timings(self) -> Timings:
        """Times of the request so far."""
        now = time.perf_counter()
        first = self._first or now
        n_prompt = len(self.prompt) - self.n_cached
        return Timings(
            n_prompt,
            1e3 * (first - self._began),
            self.n_decoded,
            1e3 * (now - first),
            self.n_ctx,
            len(self.tokens),
            self.n_drafted if self.speculator else None,
            self.n_accepted if self.speculator else None,
        )

    def status(self) -> dict[str, Any]:
        """Fields of the slot behind its generation settings."""
        task, last = self.last_task, self.finished
        limit = task.params.limit if isinstance(task, CompletionTask) else -1
        return {
            "id": self.id,
            "id_task": -1 if task is None else task.id,
            "state": int(self.state is not SlotState.IDLE),
            "prompt": None if task is None else task.prompt,
            "next_token": {
                "has_next_token": last is None,
                "n_remain": limit - self.n_decoded if limit >= 0 else -1,
                "n_decoded": self.n_decoded,
                "stopped_eos": bool(last and last.stopped_eos),
                "stopped_word": bool(last and last.stopped_word),
                "stopped_limit": bool(last and last.stopped_limit),
                "stopping_word": last.stopping_word if last else "",
            },
        }


def largest(p: NDArray[Any], n: int) -> NDArray[np.intp]:
    """Places of the n largest values, in descending order, of equal ones the first; without sorting all."""
    first = max(0, len(p) - n)
    at = np.flatnonzero(p >= np.partition(p, first)[first])
    return at[np.argsort(-p[at], kind="stable")[:n]]


def probabilities(logits: NDArray[np.float32], task: CompletionTask) -> NDArray[np.float64]:
    """Softmax of the logits with the biases of the request, [n_vocab]."""
    x = logits.astype(np.float64)
    for token, bias in task.params.sampling.logit_bias:
        x[token] += bias
    p = np.exp(x - x.max())
    return p / p.sum()
