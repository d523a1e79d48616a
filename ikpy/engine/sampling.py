"""Choice of the next token from logits: parameters, sampler chain, state (options.md#sampling).

Knows token ids only; texts enter as token sequences (DRY breakers) or behind :class:`TokenGrammar`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ikpy._native.draws import Draws
from ikpy.engine import candidates as shape
from ikpy.engine.adaptive import AdaptiveP
from ikpy.engine.candidates import Candidates, FloatArray
from ikpy.engine.dry import DryBreakers, dry_penalties
from ikpy.engine.mirostat import Mirostat
from ikpy.engine.sampler_parts import (
    History,
    KnownMaxima,
    LogitGuidance,
    NotANumberError,
    RandomNumbers,
    TokenGrammar,
)
from ikpy.engine.sampling_params import (
    DEFAULT_SAMPLERS,
    RANDOM_SEED,
    SAMPLER_NAMES,
    SamplingParams,
    sampler_sequence,
    sampler_sequence_from_letters,
)
from ikpy.errors import IkpyError, UsageError

__all__ = [
    "DEFAULT_SAMPLERS",
    "RANDOM_SEED",
    "SAMPLER_NAMES",
    "GrammarDeadEndError",
    "NotANumberError",
    "Sampler",
    "SamplingParams",
    "TokenGrammar",
    "sampler_sequence",
    "sampler_sequence_from_letters",
]


class GrammarDeadEndError(IkpyError):
    """No token of the vocabulary can continue a text under the grammar."""


@lru_cache(maxsize=2)
def _all_ids(n_vocab: int) -> NDArray[np.int32]:
    """Ids of all tokens, not to be written to."""
    ids = np.arange(n_vocab, dtype=np.int32)
    ids.flags.writeable = False
    return ids


def _check_numbers(logits: NDArray[np.float32], likeliest: int = 0) -> None:
    """NotANumberError if all logits are NaN. likeliest: their argmax, which is NaN where one is."""
    if math.isnan(logits[likeliest]) and np.isnan(logits).all():
        raise NotANumberError


def _usual_draws(params: SamplingParams, n_vocab: int) -> Draws | None:
    """The native samplers, if no others are at work and they come in their usual order."""
    idle = {
        "dry": params.dry_multiplier <= 0,
        "tfs_z": params.tfs_z >= 1,
        "typical_p": params.typical_p >= 1,
        "top_p": params.top_p >= 1,
        "min_p": params.min_p <= 0,
        "xtc": params.xtc_probability <= 0 or params.xtc_threshold > 0.5,
        "top_n_sigma": params.top_n_sigma <= 0,
        "adaptive_p": params.adaptive_target < 0,
    }
    at_work = tuple(name for name in params.samplers if not idle.get(name, False))
    usual = ("top_k", "top_p", "min_p", "temperature")
    if at_work != tuple(name for name in usual if name in at_work) or "top_k" not in at_work:
        return None
    special = params.mirostat or params.adaptive_target >= 0 or params.dynatemp_range > 0 or params.min_keep > 0
    if special or not 0 < params.top_k < n_vocab:
        return None
    top_p = params.top_p if "top_p" in at_work else 1.0
    min_p = params.min_p if "min_p" in at_work else 0.0
    t = shape.factor32(params.temperature) if "temperature" in at_work else 1.0
    return Draws(params.top_k, top_p, min_p, t)


class Sampler:
    """Chooses tokens one after another and keeps what that depends on: history, random numbers, grammar.

    ``n_ctx`` is what -1 means for the penalty windows; ``newline_id`` is exempt from penalties unless
    ``penalize_nl``; ``eos_ids`` are banned by ``ignore_eos``; ``breakers``: see
    :func:`ikpy.engine.dry.dry_breakers`.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        *,
        n_ctx: int = 0,
        newline_id: int | None = None,
        eos_ids: Iterable[int] = (),
        breakers: DryBreakers | None = None,
        grammar: TokenGrammar | None = None,
    ) -> None:
        params.check()
        self.params = params
        self.n_vocab = n_vocab
        self.n_ctx = n_ctx
        self.newline_id = newline_id
        self.breakers = breakers or {}
        self.grammar = grammar
        self.guidance: LogitGuidance | None = None
        self.seed = params.seed & 0xFFFFFFFF
        if self.seed == RANDOM_SEED:
            self.seed = int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF
        self._bias = self._collect_bias(eos_ids)
        self._usual = _usual_draws(params, n_vocab) if params.temperature > 0 else None
        self._is_plainly_greedy = params.temperature == 0 and self._bias is None and not params.has_penalties
        self._steps: dict[str, Callable[[Candidates], Candidates]] = {
            "top_k": lambda c: shape.top_k(c, params.top_k, params.min_keep),
            "tfs_z": lambda c: shape.tail_free(c, params.tfs_z, params.min_keep),
            "typical_p": lambda c: shape.typical(c, params.typical_p, params.min_keep),
            "top_p": lambda c: shape.top_p(c, params.top_p, params.min_keep),
            "min_p": lambda c: shape.min_p(c, params.min_p, params.min_keep),
            "xtc": self._xtc,
            "top_n_sigma": lambda c: shape.top_n_sigma(c, params.top_n_sigma),
            "temperature": self._temperature,
            "adaptive_p": lambda c: self._adaptive.shaped(c) if self._adaptive else c,
        }
        self.reset()

    def reset(self) -> None:
        """Forgets the history and starts the random numbers and the grammar afresh."""
        self._draws = RandomNumbers(self.seed)
        # XTC: its use leaves the draws of the other tokens unchanged, and must not depend on them.
        self._xtc_draws = RandomNumbers((self.seed, 1))
        params = self.params
        self._mirostat = Mirostat(params, self.n_vocab) if params.mirostat else None
        is_adaptive = params.adaptive_target >= 0 and not params.mirostat
        self._adaptive = AdaptiveP(params, self.n_vocab) if is_adaptive else None
        self._history = History()
        self._refused = False
        self._last: tuple[NDArray[np.int32], FloatArray] | Draws | int = np.empty(0, np.int32), np.empty(0)
        if self.grammar:
            self.grammar.reset()

    def restart_grammar(self) -> None:
        """Returns the grammar to its start for another answer; everything else goes on."""
        if self.grammar:
            self.grammar.reset()

    @property
    def last_ids(self) -> NDArray[np.int32]:
        """Candidates that the last token was drawn from."""
        if isinstance(self._last, tuple):
            return self._last[0]
        return self._last.ids if isinstance(self._last, Draws) else np.array([self._last], np.int32)

    @property
    def last_probabilities(self) -> FloatArray:
        """Their probabilities."""
        if isinstance(self._last, tuple):
            return self._last[1]
        return self._last.probabilities if isinstance(self._last, Draws) else np.ones(1)

    @property
    def history(self) -> list[int]:
        """Accepted tokens, oldest first."""
        return self._history.last(self._history.n).tolist()

    def accept(self, token: int, *, grammar: bool = True) -> None:
        """Appends ``token`` to the history; prompt tokens are accepted with ``grammar=False``, or `accept_prompt`."""
        self._history.append(int(token))
        if grammar and self.grammar:
            self.grammar.accept(int(token))
        if grammar and self.guidance:
            self.guidance.accept(int(token))
        if grammar and (feedback := self._mirostat or self._adaptive):
            feedback.accept(int(token))

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Appends the tokens of a prompt to the history."""
        self._history.extend(tokens)

    def take_back(self, n: int, kept: Iterable[int]) -> None:
        """Forgets the last ``n`` accepted tokens; ``kept`` are the generated ones that stay, for the grammar."""
        self._history.n = max(0, self._history.n - n)
        if feedback := self._mirostat or self._adaptive:
            feedback.take_back(n)
        if self.grammar:
            self.grammar.reset()
            for token in kept:
                self.grammar.accept(token)

    def sample(self, logits: NDArray[np.float32], known: KnownMaxima | None = None) -> int:
        """Next token for ``logits`` float32 [n_vocab], which stay unchanged.

        ``known``: :attr:`ikpy.engine.context.Context.known_maxima`, if they come from that context.
        Afterwards ``last_ids`` and ``last_probabilities`` hold the candidates the token was drawn from.
        """
        token, saved = (-1, None) if self._refused else self._free_choice(logits, known)
        if token >= 0 and (self.grammar is None or self.grammar.allows(token)):
            return token
        assert self.grammar is not None
        self._refused = False
        allowed = np.flatnonzero(self.grammar.mask()[: self.n_vocab])
        if not len(allowed):
            raise GrammarDeadEndError("the grammar allows no token of this vocabulary here")
        return self._choose(self._adjusted(logits) if saved is None else saved, allowed)

    def try_sample(self, logits: NDArray[np.float32], known: KnownMaxima | None = None) -> int | None:
        """As `sample`, but None where that would wait for a mask: another thread computes it.

        It is to be called again with the same logits when ``ready`` is true; `when_ready` tells.
        """
        if self.grammar is None:
            return self.sample(logits, known)
        if not self.grammar.ready:
            return None
        if not self._refused:
            token, _ = self._free_choice(logits, known)
            if self.grammar.allows(token):
                return token
            self._refused = True
            self.grammar.begin_mask()
        return self.sample(logits) if self.grammar.ready else None

    @property
    def ready(self) -> bool:
        """Whether no mask is being computed in another thread."""
        return self.grammar is None or self.grammar.ready

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls a function once ``ready`` is true, from another thread if it is not yet."""
        if self.grammar is None:
            call()
        else:
            self.grammar.when_ready(call)

    def _free_choice(
        self, logits: NDArray[np.float32], known: KnownMaxima | None
    ) -> tuple[int, NDArray[np.float32] | None]:
        """A token that the grammar may refuse, and the adjusted logits if they were made."""
        if self._is_plainly_greedy and self.guidance is None:
            token = known.likeliest(logits) if known is not None else -1
            self._last = token = token if token >= 0 else int(self._adjusted(logits).argmax())
            _check_numbers(logits.reshape(-1), token)
            return token, None
        saved = self._adjusted(logits)
        maxima = None if known is None or self._usual is None else known.block_maxima(saved)
        return self._choose(saved, None, maxima), saved

    def _adjusted(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits with biases and guidance."""
        saved = np.asarray(logits, dtype=np.float32).reshape(-1)
        if len(saved) != self.n_vocab:
            raise ValueError(f"{len(saved)} logits given to a sampler of {self.n_vocab} tokens")
        saved = self.biased(saved)
        return self.guidance.apply(saved) if self.guidance else saved

    def biased(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [n_vocab] with the biases, those of ignored ends among them; the same array if there are none."""
        if self._bias is None:
            return logits
        logits = logits.copy()
        logits[self._bias[0]] += self._bias[1]
        return logits

    def _choose(
        self,
        saved: NDArray[np.float32],
        allowed: NDArray[np.int64] | None,
        maxima: NDArray[np.float32] | None = None,
    ) -> int:
        """A token among those allowed, if these are given. maxima: of blocks of ``saved``, if they are known."""
        logits = self._penalized(saved)
        params = self.params
        if params.temperature <= 0:
            _check_numbers(logits)
            return self._greedy(logits, allowed)
        if "dry" in params.samplers and not params.mirostat and params.dry_multiplier > 0:
            logits = self._dry(logits)
        if allowed is None and self._usual is not None:
            self._last = self._usual
            unit = self._draws.next()
            try:
                return self._usual.choose(logits, unit, maxima if logits is saved else None)
            except ValueError:
                _check_numbers(logits)
                raise
        _check_numbers(logits)
        if allowed is None:
            c = Candidates(_all_ids(self.n_vocab), logits)
        else:
            c = Candidates(allowed.astype(np.int32), logits[allowed])
        if self._mirostat:
            return self._draw(self._mirostat.limited(c))
        if self._adaptive:
            self._adaptive.begin(c)
        for name in params.samplers:
            if name in self._steps:
                c = self._steps[name](c)
        return self._draw(c)

    def _penalized(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        params = self.params
        if not params.has_penalties:
            return logits
        window = self._window(params.repeat_last_n)
        if not len(window):
            return logits
        result = logits.copy()
        shape.penalize(result, window, params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
        if not params.penalize_nl and self.newline_id is not None:
            result[self.newline_id] = logits[self.newline_id]
        return result

    def _window(self, last_n: int) -> NDArray[np.int64]:
        recent = self._history.last(self.n_ctx if last_n < 0 else last_n)
        return recent[(recent >= 0) & (recent < self.n_vocab)]

    def _dry(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        params = self.params
        penalties = dry_penalties(
            self._window(params.dry_penalty_last_n),
            self.breakers,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
        )
        if penalties:
            logits = logits.copy()
        for token, amount in penalties.items():
            logits[token] -= np.float32(amount)
        return logits

    def _greedy(self, logits: NDArray[np.float32], allowed: NDArray[np.int64] | None) -> int:
        index = int(logits.argmax()) if allowed is None else int(allowed[logits[allowed].argmax()])
        if self.params.temperature < 0:
            c = Candidates(_all_ids(self.n_vocab), logits).sort()
            self._last = c.ids, c.probabilities()
        else:
            self._last = index
        return index

    def _temperature(self, c: Candidates) -> Candidates:
        params = self.params
        return shape.temperature(c, params.temperature, params.dynatemp_range, params.dynatemp_exponent)

    def _xtc(self, c: Candidates) -> Candidates:
        params = self.params
        if params.xtc_probability <= 0 or params.xtc_threshold > 0.5 or len(c) < 2:
            return c
        if self._xtc_draws.next() >= params.xtc_probability:
            return c
        return shape.xtc(c, params.xtc_threshold, params.min_keep)

    def _draw(self, c: Candidates) -> int:
        p = c.probabilities()
        self._last = c.ids, p
        cumulative = np.cumsum(p)
        r = cumulative[-1] * self._draws.next()
        index = int(np.searchsorted(cumulative, r, side="right"))
        index = min(index, int(np.flatnonzero(p)[-1]))
        token = int(c.ids[index])
        if self._mirostat:
            self._mirostat.note_drawn(token, c.ids, p)
        elif self._adaptive:
            self._adaptive.note_drawn(token)
        return token

    def _collect_bias(self, eos_ids: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        total: dict[int, float] = {}
        for token, value in self.params.logit_bias:
            if not 0 <= token < self.n_vocab:
                raise UsageError(f"logit bias for token {token}: the vocabulary has tokens 0 to {self.n_vocab - 1}")
            total[token] = total.get(token, 0.0) + float(value)
        if self.params.ignore_eos:
            total |= dict.fromkeys(eos_ids, -np.inf)
        if not total:
            return None
        return np.array(list(total), dtype=np.int64), np.array(list(total.values()), dtype=np.float32)
