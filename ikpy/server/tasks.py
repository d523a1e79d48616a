"""What the front hands to the engine thread, and what comes back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ikpy.engine.sampling import Sampler
    from ikpy.server.params import GenerationParams
    from ikpy.tools.media import Media

_ids = itertools.count()
_requests = itertools.count()


def next_request() -> int:
    """A number for an HTTP request."""
    return next(_requests)


@dataclass(frozen=True)
class TokenProbability:
    """A token with the probability it had; ``top`` holds the most probable ones as (id, probability)."""

    token: int
    probability: float
    top: tuple[tuple[int, float], ...]


class Timings(NamedTuple):
    """Times of a request; ``prompt_ms`` and ``predicted_ms`` are milliseconds, counts are tokens; the counts of drafted
    tokens are None without speculative decoding."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    n_ctx: int
    n_past: int
    cache_n: int = 0
    draft_n: int | None = None
    draft_n_accepted: int | None = None

    def json(self) -> dict[str, Any]:
        """Object ``timings`` of answers."""
        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": _ratio(self.prompt_ms, self.prompt_n),
            "prompt_per_second": _ratio(1e3 * self.prompt_n, self.prompt_ms),
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": _ratio(self.predicted_ms, self.predicted_n),
            "predicted_per_second": _ratio(1e3 * self.predicted_n, self.predicted_ms),
            "n_ctx": self.n_ctx,
            "n_past": self.n_past,
            **({} if self.draft_n is None else {"draft_n": self.draft_n, "draft_n_accepted": self.draft_n_accepted}),
        }


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


@dataclass(slots=True)
class Piece:
    """New text of a generation, with the tokens since the last piece and their probabilities; ``timings`` only
    if the request wants them. ``n_decoded``: tokens of the answer so far."""

    index: int
    id_slot: int
    text: str
    probabilities: tuple[TokenProbability, ...]
    timings: Timings | None
    n_prompt: int
    n_cached: int
    n_decoded: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Progress:
    """How much of a prompt is evaluated: ``n_done`` of ``n_prompt`` tokens, ``n_cached`` of them before, after ``ms``
    milliseconds."""

    index: int
    id_slot: int
    n_prompt: int
    n_cached: int
    n_done: int
    ms: float

    def json(self) -> dict[str, Any]:
        """Object ``prompt_progress`` of streams."""
        return {"total": self.n_prompt, "cache": self.n_cached, "processed": self.n_done, "time_ms": self.ms}


@dataclass(frozen=True)
class Finished:
    """End of a generation; exactly one of the ``stopped_`` flags is set. ``prompt_probabilities``: of all tokens of the
    prompt but the first, if they were wanted."""

    index: int
    id_slot: int
    text: str
    tokens: tuple[int, ...]
    n_prompt: int
    n_cached: int
    n_decoded: int
    n_past: int
    truncated: bool
    stopped_eos: bool
    stopped_word: bool
    stopped_limit: bool
    stopping_word: str
    probabilities: tuple[TokenProbability, ...]
    timings: Timings
    prompt_probabilities: tuple[TokenProbability, ...] = ()

    @property
    def stop_type(self) -> str:
        """Why the text ends, in llama.cpp's words."""
        return "eos" if self.stopped_eos else "word" if self.stopped_word else "limit"


@dataclass(frozen=True)
class Embedded:
    """Vectors float32 of a text of ``n_tokens`` tokens: what the ``pool`` of its task made."""

    index: int
    vectors: Any
    n_tokens: int


@dataclass(frozen=True)
class Failed:
    """The request ended with an error."""

    index: int
    code: int
    message: str


Event = Piece | Progress | Finished | Embedded | Failed


def _nobody(event: Event) -> None:
    """Takes events that nobody waits for."""


@dataclass(eq=False)
class Task:
    """Tokens to evaluate for one answer. ``sink`` takes events and may be called from the engine thread, which calls
    ``wake`` when no more come for the moment; tasks of one HTTP request have the same ``request`` number. ``media``
    are those whose rows stand for some of the tokens."""

    tokens: Sequence[int]
    sink: Callable[[Event], None]
    index: int = 0
    prompt: Any = None
    id: int = field(default_factory=lambda: next(_ids))
    cancelled: bool = False
    request: int = -1
    wake: Callable[[], None] = lambda: None
    queued: float = field(default_factory=time.monotonic)
    media: tuple[Media, ...] = ()

    def reported(self, prompt: Any) -> Task:
        """What reports of a finished task need, with so much of its prompt."""
        return replace(self, tokens=(), prompt=prompt, sink=_nobody, media=())


@dataclass(eq=False)
class CompletionTask(Task):
    """A text to continue."""

    params: GenerationParams = None  # type: ignore[assignment]
    sampler: Sampler = None  # type: ignore[assignment]

    def reported(self, prompt: Any) -> CompletionTask:
        """What reports of a finished task need, with so much of its prompt."""
        left_out: Any = {"sampler": None, "media": ()}
        return replace(self, tokens=(), prompt=prompt, sink=_nobody, **left_out)


@dataclass(eq=False)
class EmbeddingTask(Task):
    """A text to embed. ``pool`` makes of its hidden states [n_tokens, n_embd] what is kept until all texts of the
    request are evaluated."""

    pool: Callable[[Any], Any] = lambda states: states
