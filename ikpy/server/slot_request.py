"""What a slot works on, from the start of a request to its last event."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.encoded_texts import prompt_of
from ikpy.engine.prefix import common_prefix
from ikpy.server.answer import Answer
from ikpy.server.cached_text import CachedText
from ikpy.server.context_fit import ContextFit, ContextShift, RequestError
from ikpy.server.phrase_ban import PhraseBan
from ikpy.server.prompt_scores import PromptScores
from ikpy.server.slot_reports import SlotState, shown_prompt
from ikpy.server.tasks import CompletionTask, Event, Failed, Finished, Task

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.engine.speculative import Speculator
    from ikpy.tools.media_tokens import MediaReader
    from ikpy.vocab import Vocab


class SlotRequest(CachedText):
    """Works on one request at a time, with room for ``n_ctx`` tokens. Used by the engine thread; others may read it."""

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
        media: MediaReader | None = None,
    ) -> None:
        super().__init__(index, context, speculator)
        self._media = media
        self.n_ctx = n_ctx
        self.fit = ContextFit(n_ctx, may_shift=shift and context.kv.can_shift, add_bos=vocab.add_bos)
        self.task: Task | None = None
        self.last_task: Task | None = None
        self.state = SlotState.IDLE
        self.last_used = 0.0
        self._vocab = vocab
        self._special = special
        self.n_endless = max(n_ctx, context.model.hparams.n_ctx_train)
        """Tokens of prompt and answer at which answers without a limit end; those of a model in a loop never would."""
        self._reset()

    def _reset(self) -> None:
        self.prompt: list[int] = []
        self.n_cached = 0
        self.truncated = False
        self.pending: int | None = None
        self.finished: Finished | None = None
        self.draft: list[int] = []
        self.is_stale = False
        """Whether no later prompt may go on from the text."""
        self.n_drafted = 0
        self.n_accepted = 0
        self.held: NDArray[np.float32] | None = None
        """Logits of the next token, which waits for the mask of a grammar."""
        self.answer: Answer | None = None
        self._expected: int | None = None
        """The guess at the token that is drawn next."""
        self.shifted: ContextShift | None = None
        """What `take_pending` dropped last."""
        self._states: list[NDArray[np.float32]] = []
        self.has_media = False
        """Whether the request has pictures or sounds."""
        self._turn = 0
        self._ban: PhraseBan | None = None
        self.scores: PromptScores | None = None
        """Probabilities of the prompt's tokens, if the request wants them."""
        self.began = time.perf_counter()

    # requests

    def start(self, task: Task) -> None:
        """Takes a request; `keep_prefix` decides what of the cache serves it. Raises RequestError if it cannot fit."""
        self._reset()
        self.task = self.last_task = task
        self.state = SlotState.PROMPT
        self.prompt = list(task.tokens)
        if isinstance(task, CompletionTask):
            self.answer = Answer(task, self._vocab, special=self._special)
            self._ban = PhraseBan(task.params.banned) if task.params.banned else None
            n_top = task.params.prompt_probs
            self.scores = None if n_top is None else PromptScores(self.prompt, n_top)
            self.prompt = prompt_of(self._context, task.tokens)
            self.prompt = self.fit.fitted(self.prompt, task.params, whole=bool(task.media) or self._reads_texts)
            self.truncated = len(self.prompt) < len(task.tokens)
        else:
            self.is_stale = True  # no prompt goes on from a text that was embedded, and it is not worth saving
        if self._media is not None and (task.media or self._reads_texts):
            self.has_media, self._turn = True, self._media.store.turn(self.prompt)
        if self._reads_texts:
            self._check_text()

    @property
    def _reads_texts(self) -> bool:
        """Whether prompts are texts for an encoder."""
        return self._media is not None and self._media.store.holds_texts

    def _check_text(self) -> None:
        """RequestError for a text that the encoder cannot read at once, or whose tokens shall have probabilities."""
        self.is_stale = True  # the encoder reads every text anew
        if self.scores is not None:
            raise RequestError("the tokens of a prompt that an encoder reads have no probabilities")
        if self._turn > self._context.n_ubatch:
            raise RequestError(
                f"the {self._turn} tokens of the prompt do not fit a micro-batch of {self._context.n_ubatch}: raise -ub"
            )

    @property
    def holds_media(self) -> bool:
        """Whether the text that is cached has."""
        return self._media is not None and self._media.store.has_media(self.tokens)

    def turn(self, place: int) -> int:
        """Difference between rotation position and place of a token, for what lies before it."""
        if not self.has_media or self._media is None:
            return 0
        return self._turn if place >= len(self.prompt) else self._media.store.turn(self.prompt[:place])

    def uncut(self, n: int, taken: int) -> tuple[int, int]:
        """Of the next n tokens of the prompt those that cut no picture, or all of a picture, and the bytes of rows that
        they need, which are there; 0 tokens if they have no room beside so many bytes ``taken`` by others.

        Raises whatever goes wrong when rows are made again.
        """
        assert self.task is not None and self._media is not None
        reader, media, left = self._media, self.task.media, self.prompt[len(self.tokens) :]
        n = reader.store.cut(left, n)
        n, n_bytes = reader.fitting(media, left[:n], taken)
        reader.refresh(media, left[:n])
        return n, n_bytes

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of all tokens of the prompt are wanted."""
        return self.scores is not None

    @property
    def may_reuse(self) -> bool:
        """Whether the request accepts tokens that are evaluated already."""
        return isinstance(self.task, CompletionTask) and self.task.params.cache_prompt and not self.scores_prompt

    def keep_prefix(self) -> None:
        """Keeps what the cache shares with the prompt; at least one token is left to evaluate."""
        keep = min(common_prefix(self.tokens, self.prompt), len(self.prompt) - 1) if self.may_reuse else 0
        if self.has_media and self._media is not None:
            keep = min(keep, self._media.store.cut(self.prompt, keep))
        self.n_cached = self.truncate(keep)

    def release(self) -> None:
        """Ends the request; the cache stays for the next one, without guesses that were not judged."""
        self.task = None
        self._forget()
        self.state = SlotState.IDLE
        self.pending = self.held = None
        self.last_used = time.monotonic()
        if self.draft:
            self.drop_guesses()
            self.draft = []
        if self.is_stale:
            self.truncate(0)
            self.is_stale = False

    def _forget(self) -> None:
        """Lets go of what an idle slot does not report: tokens, probabilities, logits, who waited for the answer."""
        if self.last_task is not None:
            self.last_task = self.last_task.reported(shown_prompt(self.last_task, self.n_ctx))
        if self.finished is not None:
            self.finished = replace(self.finished, text="", tokens=(), probabilities=(), prompt_probabilities=())
        if self.answer is not None and self.last_task is not None:
            self.answer.forget()
        self.scores = None
        if self._ban is not None:
            self._ban.held.clear()

    def emit(self, event: Event) -> None:
        """Hands an event to whoever waits for it."""
        if self.task is not None and not self.task.cancelled:
            self.task.sink(event)

    def fail(self, code: int, message: str) -> None:
        """Ends the request with an error."""
        self._end_with(Failed(self.task.index if self.task else 0, code, message))

    def _end_with(self, event: Event) -> None:
        """Last event of the request. The slot is idle before its client can know, who is told whatever goes wrong."""
        task = self.task
        try:
            self.release()
        finally:
            if task is not None and not task.cancelled:
                task.sink(event)

    # reports

    @property
    def n_decoded(self) -> int:
        """Tokens drawn for the request."""
        answer = self.answer  # another thread may ask while this one starts a request
        return 0 if answer is None else answer.n_decoded

    @property
    def token_delay(self) -> float | None:
        """Seconds between the last two tokens."""
        return None if self.answer is None else self.answer.token_delay

    @property
    def n_waiting(self) -> int:
        """Prompt tokens that are not evaluated yet."""
        return len(self.prompt) - len(self.tokens) if self.state is SlotState.PROMPT else 0
