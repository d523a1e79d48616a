"""Speculative decoding: cheap guesses at the next tokens, checked by the model in one batch.

A drafter proposes tokens; the model evaluates them behind the last one, and the sampler chooses at every position as it
would have without them. Guesses are kept as long as they equal the choice, so a guess never changes what is drawn: the
same random numbers meet the same distributions, one per token given out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ikpy.errors import IkpyError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ikpy.engine.context import Context
    from ikpy.engine.media import MediaStore
    from ikpy.engine.model import Model
    from ikpy.engine.session import SequenceState

NGRAM_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
SPECULATION_TYPES = ("none", *NGRAM_TYPES, "suffix", "draft", "mtp", "eagle3", "dflash", "dspark")
LAYER_READING_TYPES = frozenset({"eagle3", "dflash", "dspark"})
"""Drafters of files of their own that read inputs of layers of the model."""
READING_TYPES = LAYER_READING_TYPES | {"mtp"}
"""Drafters that read states of the model, which its context must keep."""


@dataclass(frozen=True)
class SpeculativeParams:
    """What is drafted.

    ``types``: drafters in the order in which they are asked. ``n_max``, ``n_min``: most and fewest tokens of a draft
    (shorter ones are dropped). ``p_min``: least probability of a drafted token (draft model) or of the whole draft
    (suffix). ``size_n``, ``size_m``, ``min_hits``: length of the looked-up n-gram, of the draft, and how often the
    n-gram must have occurred. ``pattern_len``, ``max_depth``: shortest and longest suffix that is matched.
    """

    types: tuple[str, ...] = ()
    n_max: int = 16
    n_min: int = 0
    p_min: float = 0.8
    size_n: int = 12
    size_m: int = 48
    min_hits: int = 1
    pattern_len: int = 3
    max_depth: int = 64

    def check(self) -> None:
        """Raises UsageError for values without a meaning."""
        for name in self.types:
            if name not in SPECULATION_TYPES:
                raise UsageError(f"--spec-type {name}: possible types are {', '.join(SPECULATION_TYPES)}")
        for name in ("size_n", "size_m", "min_hits", "pattern_len", "max_depth"):
            if getattr(self, name) < 1:
                raise UsageError(f"speculative decoding: {name} must be at least 1, not {getattr(self, name)}")
        for name in ("n_max", "n_min"):
            if getattr(self, name) < 0:
                raise UsageError(f"speculative decoding: {name} must be at least 0, not {getattr(self, name)}")
        if not 0 <= self.p_min <= 1:
            raise UsageError(f"speculative decoding: p_min must be between 0 and 1, not {self.p_min:g}")


def probable_tokens(
    logits: NDArray[np.float32], n_max: int, p_min: float, follow: Callable[[list[int]], NDArray[np.float32]]
) -> list[int]:
    """The most likely tokens, one behind the other, while their probability is at least ``p_min``; at most ``n_max``.

    ``logits``: float32 [n_vocab] of the first one. ``follow``: those behind the tokens found so far. A largest one that
    is no finite number, as a damaged draft model gives, ends the guesses.
    """
    found: list[int] = []
    while True:
        token = int(logits.argmax())
        if not np.isfinite(logits[token]) or 1.0 / np.exp(logits.astype(np.float64) - logits[token]).sum() < p_min:
            return found
        found.append(token)
        if len(found) == n_max:
            return found
        logits = follow(found)


class Drafter:
    """Guesses continuations of one sequence.

    A drafter with ``needs_states`` (a multi-token prediction head) gets the model's hidden states through ``observe``,
    and texts with their pictures; all others get texts without them.
    """

    name: ClassVar[str]
    needs_states: ClassVar[bool] = False

    def begin(self, tokens: Sequence[int]) -> None:
        """A new text starts with ``tokens``; what was learned from others may be kept."""

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        """At most ``n_max`` tokens that may follow ``tokens``; empty without a good guess. ``p_min`` replaces the least
        probability of drafters that have one."""
        raise NotImplementedError

    def accept(self, n_accepted: int) -> None:
        """How many tokens of the last draft the model chose as well."""

    def observe(self, text: Sequence[int], states: NDArray[np.float32]) -> None:
        """Hidden states float32 [n, n_embd] behind the last n tokens of ``text``, which have been evaluated."""

    def adopt(self, other: Drafter, n: int) -> None:
        """The text begins with the first n tokens of the one that another drafter of this kind has observed."""

    def shift(self, keep: int, drop: int) -> None:
        """Of the text, the ``drop`` tokens behind the first ``keep`` were taken out; those behind them moved up."""

    def take_state(self) -> SequenceState | None:
        """A copy of what the drafter has computed for its text, if that is worth keeping."""
        return None

    def put_state(self, state: SequenceState) -> None:
        """Goes on with the text of a state that a drafter of this kind has given."""

    @property
    def state_nbytes(self) -> int:
        """Bytes that `take_state` would copy."""
        return 0

    def write_state(self, path: Path) -> None:
        """Writes what `take_state` gives to a file. Raises OSError."""

    def read_state(self, path: Path) -> None:
        """Goes on with a text that `write_state` wrote. Raises OSError, FileFormatError, KVCacheFullError."""

    def save(self) -> None:
        """Writes what should outlive the program. Raises IkpyError if that cannot be done."""


@dataclass
class DraftStatistics:
    """Counts and times (begin, draft, accept; seconds) of one drafter."""

    n_calls: int = 0
    n_drafts: int = 0
    n_accepted_drafts: int = 0
    n_tokens: int = 0
    n_accepted_tokens: int = 0
    begin: float = 0.0
    draft: float = 0.0
    accept: float = 0.0

    def line(self, name: str) -> str:
        """The line users know from llama.cpp's log."""
        return (
            f"statistics {name.replace('-', '_')}: #calls = {self.n_calls}, #gen drafts = {self.n_drafts}, "
            f"#acc drafts = {self.n_accepted_drafts}, #gen tokens = {self.n_tokens}, "
            f"#acc tokens = {self.n_accepted_tokens}, dur(b,g,a) = "
            f"{self.begin * 1e3:.3f}, {self.draft * 1e3:.3f}, {self.accept * 1e3:.3f} ms"
        )


def acceptance_line(n_accepted: int, n_drafted: int) -> str:
    """Share of the drafted tokens that were kept."""
    rate = n_accepted / n_drafted if n_drafted else 0.0
    return f"draft acceptance rate = {rate:.5f} ({n_accepted:5d} accepted / {n_drafted:5d} generated)"


class Speculator:
    """The drafters of one sequence, asked in order until one has a guess, with their statistics.

    ``media``: pictures that texts may have.
    """

    def __init__(self, drafters: Sequence[Drafter], params: SpeculativeParams, media: MediaStore | None = None) -> None:
        params.check()
        self.drafters = drafters
        self.params = params
        self.media = media
        self.statistics = [DraftStatistics() for _ in drafters]
        self._last: int | None = None
        self._n_last = 0

    @property
    def needs_states(self) -> bool:
        """Whether a drafter wants the model's hidden states."""
        return any(drafter.needs_states for drafter in self.drafters)

    @property
    def n_drafted(self) -> int:
        """Drafted tokens so far."""
        return sum(s.n_tokens for s in self.statistics)

    @property
    def n_accepted(self) -> int:
        """Drafted tokens that were kept."""
        return sum(s.n_accepted_tokens for s in self.statistics)

    def begin(self, tokens: Sequence[int]) -> None:
        """A new text starts with ``tokens``."""
        for drafter, statistics in zip(self.drafters, self.statistics, strict=True):
            began = time.perf_counter()
            drafter.begin(self._seen(drafter, tokens))
            statistics.begin += time.perf_counter() - began

    def draft(
        self, tokens: Sequence[int], n_max: int | None = None, n_min: int | None = None, p_min: float | None = None
    ) -> list[int]:
        """Guess at what follows ``tokens``, of at most as many tokens as the parameters and ``n_max`` allow; ``n_min``
        and ``p_min`` replace those of the parameters. A guess of ``n_max`` tokens is never too short."""
        self._last, self._n_last = None, 0
        n_min = self.params.n_min if n_min is None else n_min
        if n_min > self.params.n_max:
            return []
        n_max = self.params.n_max if n_max is None else min(n_max, self.params.n_max)
        n_min = min(n_min, n_max)
        if n_max < 1:
            return []
        for i, (drafter, statistics) in enumerate(zip(self.drafters, self.statistics, strict=True)):
            began = time.perf_counter()
            seen = self._seen(drafter, tokens)
            found = drafter.draft(seen, n_max, p_min)[:n_max] if seen else []
            statistics.draft += time.perf_counter() - began
            statistics.n_calls += 1
            if found and len(found) >= n_min:
                statistics.n_drafts += 1
                statistics.n_tokens += len(found)
                self._last, self._n_last = i, len(found)
                return found
        return []

    def _seen(self, drafter: Drafter, tokens: Sequence[int]) -> Sequence[int]:
        """What a drafter sees of a text."""
        if self.media is None or drafter.needs_states or not self.media.has_media(tokens):
            return tokens
        return self.media.without(tokens)

    def accept(self, n_accepted: int) -> None:
        """How many tokens of the last draft were kept."""
        if self._last is None:
            return
        statistics = self.statistics[self._last]
        began = time.perf_counter()
        self.drafters[self._last].accept(n_accepted)
        statistics.accept += time.perf_counter() - began
        statistics.n_accepted_drafts += n_accepted > 0
        statistics.n_accepted_tokens += n_accepted
        self._last = None

    def observe(self, text: Sequence[int], states: NDArray[np.float32]) -> None:
        """Hidden states float32 [n, n_embd] behind the last n tokens of ``text``, which have been evaluated."""
        for drafter in self.drafters:
            if drafter.needs_states:
                drafter.observe(text, states)

    def adopt(self, other: Speculator, n: int) -> None:
        """The text begins with the first n tokens of another's, who has drafters of the same kinds."""
        for drafter, theirs in zip(self.drafters, other.drafters, strict=True):
            drafter.adopt(theirs, n)

    def shift(self, keep: int, drop: int) -> None:
        """The ``drop`` tokens behind the first ``keep`` were taken out of the text."""
        for drafter in self.drafters:
            drafter.shift(keep, drop)

    def take_states(self) -> tuple[SequenceState | None, ...]:
        """Copies of what the drafters have computed for the text."""
        return tuple(drafter.take_state() for drafter in self.drafters)

    def put_states(self, states: Sequence[SequenceState | None]) -> None:
        """Goes on with a text whose states another speculator of this kind has given."""
        for drafter, state in zip(self.drafters, states, strict=True):
            if state is not None:
                drafter.put_state(state)

    @property
    def state_nbytes(self) -> int:
        """Bytes that `take_states` would copy."""
        return sum(drafter.state_nbytes for drafter in self.drafters)

    def save(self) -> list[str]:
        """Lets the drafters write their files; why those that could not be written were not."""
        failures = []
        for drafter in self.drafters:
            try:
                drafter.save()
            except IkpyError as error:
                failures.append(str(error))
        return failures

    def lines(self) -> list[str]:
        """Acceptance rate and a line per drafter."""
        lines = [acceptance_line(self.n_accepted, self.n_drafted)]
        return lines + [s.line(d.name) for d, s in zip(self.drafters, self.statistics, strict=True)]


class Speculation:
    """Makes the speculators of the sequences of a context; what drafters share is made once.

    ``makers``: for every type of ``params.types``, a function from a sequence id to a drafter. ``media``: pictures that
    texts may have. ``models``, ``contexts``: those of draft files, and all that drafters use.
    """

    def __init__(
        self,
        params: SpeculativeParams,
        makers: Sequence[Callable[[int], Drafter]],
        media: MediaStore | None = None,
        models: Sequence[Model] = (),
        contexts: Sequence[Context] = (),
    ) -> None:
        params.check()
        self.params = params
        self.models, self.contexts = models, contexts
        self._makers = makers
        self._media = media

    def speculator(self, seq_id: int = 0) -> Speculator:
        """Drafters of one sequence."""
        return Speculator([make(seq_id) for make in self._makers], self.params, self._media)
