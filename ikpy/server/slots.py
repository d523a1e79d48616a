"""A slot: one sequence of the context, whose tokens are evaluated and drawn for a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.kv_cache import KVCacheFullError
from ikpy.server.context_fit import RequestError
from ikpy.server.phrase_ban import HeldToken, PhraseBan
from ikpy.server.probabilities import of_token
from ikpy.server.slot_reports import SlotState, finished, timings_of
from ikpy.server.slot_request import SlotRequest
from ikpy.server.tasks import CompletionTask, Embedded, EmbeddingTask, Piece

if TYPE_CHECKING:
    from ikpy.server.answer import Answer
    from ikpy.server.tasks import TokenProbability


class Slot(SlotRequest):
    """A request at work: what the engine evaluates next, and the tokens that come of it."""

    def take_prompt(self, n: int) -> list[int]:
        """The next n prompt tokens, which the caller evaluates."""
        piece = self.prompt[len(self.tokens) : len(self.tokens) + n]
        self.tokens += piece
        return piece

    def take_pending(self, n_max: int) -> list[int]:
        """The sampled token and at most ``n_max`` guesses at those behind it (``draft``), which the caller evaluates.

        A full context is shifted; if it cannot be, or an answer without a limit is as long as the training context,
        the answer ends here and nothing is returned. RequestError: the shift failed.
        """
        assert self.pending is not None
        self.shifted = None
        full = len(self.tokens) + 1 >= self.n_ctx
        if (full and not self._may_shift) or self._n_left <= 0:
            self._end_full()
            return []
        if full:
            self._shift_context()
        token, self.pending = self.pending, None
        self.tokens.append(token)
        self.draft = self._guess(min(n_max, self.n_ctx - len(self.tokens) - 1))
        self.n_drafted += len(self.draft)
        return [token, *self.draft]

    @property
    def _may_shift(self) -> bool:
        may_move = self._context.moves_media and self.speculator is None
        return self.fit.may_shift and (may_move or not self.has_media)

    @property
    def _may_guess(self) -> bool:
        """Whether guesses serve the request: banned phrases are taken back token by token."""
        task = self.last_task
        wanted = isinstance(task, CompletionTask) and task.params.draft_n_max != 0
        return wanted and self.speculator is not None and self._ban is None

    @property
    def _n_left(self) -> int:
        """Tokens the answer may still have."""
        assert isinstance(self.task, CompletionTask)
        limit = self.task.params.limit
        return (limit if limit >= 0 else self.n_endless - len(self.prompt)) - self.n_decoded

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
        n_max = min(n_max, self._n_left - 1, n_max if params.draft_n_max is None else params.draft_n_max)
        return self.speculator.draft(self.tokens, n_max, params.draft_n_min, params.draft_p_min)

    def sample_all(self, rows: NDArray[np.float32]) -> None:
        """Draws tokens from logits [1 + number of guesses, n_vocab] until one differs from its guess.

        What was evaluated behind the last kept token leaves the cache. Of a prompt that is scored the rows are those of
        its next tokens, and only the one behind its end is drawn from.
        """
        if self.scores is not None and self.state is SlotState.PROMPT:
            self.scores.add(rows)
            if self.n_waiting:
                return
            rows = rows[-1:]
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
                self.drop_guesses()
            self.speculator.accept(self.n_accepted - accepted_before)

    def _shift_context(self) -> None:
        """Drops old tokens behind the kept beginning."""
        assert isinstance(self.task, CompletionTask)
        store = self._media.store if self.has_media and self._media is not None else None
        shift = self.fit.shift(self.tokens, self.prompt, self.task.params, store)
        try:
            self.drop(shift.n_keep, shift.n_discard)
        except KVCacheFullError as error:
            raise RequestError(str(error)) from None
        self.truncated = True
        self.shifted = shift

    def add_states(self, states: NDArray[np.float32]) -> None:
        """Hidden states [n, n_embd] of evaluated tokens of an embedding request."""
        assert isinstance(self.task, EmbeddingTask)
        self._states.append(states)
        if self.n_waiting == 0:
            found, self._states = np.concatenate(self._states), []
            self._end_with(Embedded(self.task.index, self.task.pool(found), len(self.prompt)))

    def sample(self, logits: NDArray[np.float32]) -> None:
        """Draws a token from logits [n_vocab], hands out its text, and ends the request when a stop rule holds."""
        answer = self.answer
        assert answer is not None
        task = answer.task
        if self.state is SlotState.PROMPT:
            self._begin(answer)
            if task.params.limit == 0:
                self._finish(answer, "")
                return
        if self._ban is not None:
            self._sample_unbanned(answer, self._ban, logits)
            return
        drawn = task.sampler.try_sample(logits, self._context.known_maxima)
        if drawn is None:
            self.held = logits.copy()
            return
        task.sampler.accept(drawn)
        self._add_token(answer, drawn, of_token(task, drawn, logits))

    def _begin(self, answer: Answer) -> None:
        """The prompt is evaluated, the first token can be drawn."""
        self.state = SlotState.GENERATING
        answer.begin()
        params, sampler = answer.task.params, answer.task.sampler
        sampler.accept_prompt(self._known_tokens() if params.penalty_prompt is None else params.penalty_prompt)
        if self.speculator is not None:
            self.speculator.begin(self.prompt)

    def _known_tokens(self) -> list[int]:
        """The prompt without its pictures."""
        return [token for token in self.prompt if token < self._vocab.n_tokens] if self.has_media else self.prompt

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

    def _sample_unbanned(self, answer: Answer, ban: PhraseBan, logits: NDArray[np.float32]) -> None:
        """Draws a token; one that completes a banned phrase is taken back with the phrase, and another is drawn."""
        task, eog = answer.task, self._vocab.eog
        while True:
            row = ban.biased(logits)
            token = task.sampler.sample(row)
            task.sampler.accept(token)
            piece = b"" if token in eog else answer.piece(token)
            ban.add(HeldToken(token, piece, of_token(task, token, row)))
            ends = token in eog or answer.at_limit(len(ban.held))
            n = ban.n_back(ended=ends)
            if n > 1 and not self._can_go_back(n):
                n = 1  # only the last token, which is not evaluated yet
            if n == 0 or not ban.may_take_back(n):
                break
            ban.take_back(n)
            answer.n_decoded += n
            task.sampler.take_back(n, [*answer.tokens, *(item.token for item in ban.held)])
            if answer.at_limit(len(ban.held)):
                self._finish_held(answer)
                return
            if n > 1:
                self._go_back(n)
                return
        self._add_released(answer, ban.release(everything=n > 0 or ends))
        if self.task is task:
            self.pending = token

    def _can_go_back(self, n: int) -> bool:
        """Whether the cache can go on in front of the token before the last n, of which the last is not evaluated."""
        place = len(self.tokens) - n
        in_media = self._media is not None and self._media.store.has_media(self.tokens[max(place, 0) :])
        return place >= 0 and not in_media and self.reusable(place) == place

    def _go_back(self, n: int) -> None:
        """Removes the last n tokens. The one before them is evaluated again, as the logits of a place are not kept:
        those of all tokens that may wait would take hundreds of MiB."""
        place = len(self.tokens) - n
        self.pending = self.tokens[place]
        self.truncate(place)

    def _add_released(self, answer: Answer, tokens: list[HeldToken]) -> None:
        """Adds tokens that have waited to the answer, until a stop rule holds."""
        for item in tokens:
            if self.task is answer.task:
                self._add_token(answer, item.token, item.probability)

    def _finish_held(self, answer: Answer) -> None:
        """Ends the request with what it has, tokens that wait for the rest of a phrase included."""
        if self._ban is not None:
            self._add_released(answer, self._ban.release(everything=True))
        if self.task is answer.task:
            self._finish(answer, "")

    def _end_full(self) -> None:
        """Ends an answer for which the context has no room and that may not drop more old tokens."""
        assert self.answer is not None
        self.truncated = True
        self._finish_held(self.answer)

    def _add_token(self, answer: Answer, token: int, probability: TokenProbability | None) -> None:
        self.n_accepted += token == self._expected
        self.pending = token
        text = answer.add(token, probability)
        if answer.is_complete:
            self._finish(answer, text or "")
        elif text is not None:
            self._emit_piece(answer, text)

    def _emit_piece(self, answer: Answer, text: str) -> None:
        task = answer.task
        if not task.params.stream:
            return
        unsent, tokens = answer.take_unsent(), answer.take_tokens()
        timings = timings_of(self) if task.params.timings_per_token else None
        place, lengths = (task.index, self.id), (len(self.prompt), self.n_cached, answer.n_decoded)
        self.emit(Piece(*place, text, unsent, timings, *lengths, tokens))

    def _finish(self, answer: Answer, text: str) -> None:
        """Last piece and end of the request."""
        text += answer.finish()
        if answer.n_decoded:
            self._emit_piece(answer, text)
        self.finished = finished(self, answer)
        self._end_with(self.finished)
