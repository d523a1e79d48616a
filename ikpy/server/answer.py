"""What a slot has written for one request: tokens, text, probabilities, and when."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ikpy.server.text_stream import TextStream

if TYPE_CHECKING:
    from ikpy.server.tasks import CompletionTask, TokenProbability
    from ikpy.vocab import Vocab


class Answer:
    """Tokens of a completion so far. ``special``: control tokens have text."""

    def __init__(self, task: CompletionTask, vocab: Vocab, *, special: bool) -> None:
        self.task = task
        self.tokens: list[int] = []
        self.probabilities: list[TokenProbability] = []
        self.n_decoded = 0
        """Tokens of the answer and those that were taken back."""
        self.ended = False
        """Whether the last token ends the text."""
        self.first = 0.0
        """Time of `begin`."""
        self.token_delay: float | None = None
        """Seconds between the last two tokens."""
        self._vocab = vocab
        self._special = special
        self._text = TextStream(task.params.stop, task.params.n_indent)
        self._unsent: list[TokenProbability] = []
        self._n_sent = 0
        """Tokens that `take_tokens` has given out."""
        self._ends_line = False
        """Whether the last token has the end of a line."""
        self._last_token = 0.0

    def begin(self) -> None:
        """The prompt is evaluated."""
        self.first = time.perf_counter()

    def add(self, token: int, probability: TokenProbability | None) -> str | None:
        """Adds a token; the text to give out, None while a character is unfinished."""
        self.n_decoded += 1
        now = time.perf_counter()
        self.token_delay = now - self._last_token if self._last_token else None
        self._last_token = now
        self.tokens.append(token)
        if probability is not None:
            self.probabilities.append(probability)
            self._unsent.append(probability)
        self.ended = token in self._vocab.eog
        piece = b"" if self.ended else self.piece(token)
        self._ends_line = b"\n" in piece
        return self._text.feed(piece)

    def take_unsent(self) -> tuple[TokenProbability, ...]:
        """Probabilities of the tokens since the last call."""
        unsent, self._unsent = tuple(self._unsent), []
        return unsent

    def take_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens since the last call."""
        first, self._n_sent = self._n_sent, len(self.tokens)
        return tuple(self.tokens[first:])

    def forget(self) -> None:
        """Lets go of all but the numbers and times."""
        self.task = self.task.reported(None)
        self.tokens, self.probabilities, self._unsent = [], [], []
        self._text = TextStream(())

    def finish(self) -> str:
        """The rest of the text, at the end. A stop string in the text goes before the end token."""
        return self._text.finish() if self._text.stopping_word is None else ""

    def piece(self, token: int) -> bytes:
        """Text of a token."""
        return self._vocab.token_to_piece(token, self._special or token in self.task.params.preserved_tokens)

    @property
    def text(self) -> str:
        """All text, up to a stop string."""
        return self._text.text

    @property
    def stopping_word(self) -> str | None:
        """The stop string that was found."""
        return self._text.stopping_word

    @property
    def is_complete(self) -> bool:
        """Whether a stop rule holds."""
        text = self._text
        return self.ended or text.stopping_word is not None or text.is_outdented or self.at_limit()

    def at_limit(self, n_held: int = 0) -> bool:
        """Whether no token may follow; ``n_held`` more wait to be added. A line that was begun in time is ended."""
        if 0 <= self.task.params.limit <= self.n_decoded + n_held:
            return True
        limit = self.task.params.t_max_predict_ms
        return self._ends_line and 0 < limit < 1e3 * (time.perf_counter() - self.first)
