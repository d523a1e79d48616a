"""Parameters of one generation and how answers show them (requests: `read_params`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy.engine.sampling import RANDOM_SEED, SamplingParams

if TYPE_CHECKING:
    from ikpy.engine.grammars.lazy_grammar import Trigger
    from ikpy.engine.grammars.thinking import ThinkingLimit
    from ikpy.server.phrase_ban import BannedPhrases
    from ikpy.server.settings import ServerSettings


@dataclass
class GenerationParams:
    """One request's sampling values and stop rules.

    ``n_predict`` is the request's token limit (-1: not given), ``limit`` the one that holds (-1: none), ``n_probs`` the
    number of reported probabilities per token, ``prompt_probs`` the same for tokens of the prompt (None: these are not
    scored, 0: only what each token had), ``return_progress`` sends events while a streamed prompt is evaluated,
    ``return_tokens`` shows the ids of the tokens, ``t_max_predict_ms`` is the time in milliseconds after which no other
    line is begun (0: none), ``n_indent`` the least number of blanks before further lines, ``n`` the number of answers
    per prompt, ``preserved_tokens`` are control tokens whose text is given out, ``trigger`` says when the grammar
    begins to hold (None: at once), ``draft_n_max`` and ``draft_n_min`` bound drafts within the server's own limits,
    ``draft_p_min`` replaces the server's least probability of drafts, ``lora`` are scales of adapters by id (None: the
    server's), ``thinking`` limits reasoning (None: no limit), ``cache_reuse`` is the least length in tokens of moved
    pieces of the cache (0: none), ``banned`` are phrases that may not appear, ``penalty_prompt`` are tokens that the
    penalties see instead of the prompt, ``wrong_types`` are fields of the request that were not taken.
    """

    sampling: SamplingParams
    n_predict: int = -1
    limit: int = -1
    n_keep: int = 0
    n_discard: int = 0
    stop: tuple[str, ...] = ()
    n_probs: int = 0
    prompt_probs: int | None = None
    post_sampling_probs: bool = False
    stream: bool = False
    cache_prompt: bool = True
    cache_reuse: int = 0
    id_slot: int = -1
    timings_per_token: bool = False
    return_progress: bool = False
    return_tokens: bool = False
    t_max_predict_ms: int = 0
    n_indent: int = 0
    n: int = 1
    response_fields: tuple[str, ...] = ()
    default_samplers: bool = True
    chat_format: str = "Content-only"
    reasoning_format: str = "deepseek"
    preserved_tokens: frozenset[int] = frozenset()
    draft_n_max: int | None = None
    draft_n_min: int | None = None
    draft_p_min: float | None = None
    lora: dict[int, float] | None = None
    trigger: Trigger | None = None
    thinking: ThinkingLimit | None = None
    banned: BannedPhrases | None = None
    penalty_prompt: tuple[int, ...] | None = None
    wrong_types: tuple[str, ...] = ()

    @property
    def has_quick_sampler(self) -> bool:
        """Whether a sampler needs neither a grammar nor the texts of all tokens."""
        return not self.sampling.has_grammar and self.thinking is None and self.sampling.dry_multiplier <= 0


def single(value: float) -> float:
    """The value as a 32-bit float holds it, which is how parameters are shown."""
    return float(np.float32(value))


def describe(
    params: GenerationParams, settings: ServerSettings, n_ctx: int, n_ctx_slot: int, eos: int | None
) -> dict[str, Any]:
    """Generation settings as answers show them. ``n_ctx`` is what -1 means for the penalty windows."""
    s = params.sampling
    bias: list[list[Any]] = [[i, b if math.isfinite(b) else None] for i, b in s.logit_bias]
    if s.ignore_eos and eos is not None:
        bias.append([eos, None])
    return {
        "n_ctx": n_ctx_slot,
        "n_predict": settings.n_predict,
        "model": settings.alias,
        "seed": s.seed,
        "temperature": single(s.temperature),
        "dynatemp_range": single(s.dynatemp_range),
        "dynatemp_exponent": single(s.dynatemp_exponent),
        "top_k": s.top_k,
        "top_p": single(s.top_p),
        "min_p": single(s.min_p),
        "top_n_sigma": single(s.top_n_sigma),
        "xtc_probability": single(s.xtc_probability),
        "xtc_threshold": single(s.xtc_threshold),
        "tfs_z": single(s.tfs_z),
        "typical_p": single(s.typical_p),
        "repeat_last_n": n_ctx if s.repeat_last_n < 0 else s.repeat_last_n,
        "repeat_penalty": single(s.repeat_penalty),
        "presence_penalty": single(s.presence_penalty),
        "frequency_penalty": single(s.frequency_penalty),
        "penalty_prompt_tokens": list(params.penalty_prompt or ()),
        "use_penalty_prompt_tokens": params.penalty_prompt is not None,
        "dry_multiplier": single(s.dry_multiplier),
        "dry_base": single(s.dry_base),
        "dry_allowed_length": s.dry_allowed_length,
        "dry_penalty_last_n": n_ctx if s.dry_penalty_last_n < 0 else s.dry_penalty_last_n,
        "dry_sequence_breakers": list(s.dry_sequence_breakers),
        "mirostat": s.mirostat,
        "mirostat_tau": single(s.mirostat_tau),
        "mirostat_eta": single(s.mirostat_eta),
        "adaptive_target": single(s.adaptive_target),
        "adaptive_decay": single(s.adaptive_decay),
        "adaptive_updt_w_cur": s.adaptive_updt_w_cur,
        "penalize_nl": s.penalize_nl,
        "stop": list(params.stop),
        "max_tokens": params.n_predict,
        "n_keep": params.n_keep,
        "n_discard": params.n_discard,
        "ignore_eos": s.ignore_eos,
        "stream": params.stream,
        "logit_bias": bias,
        "n_probs": params.n_probs,
        "post_sampling_probs": params.post_sampling_probs,
        "timings_per_token": params.timings_per_token,
        "min_keep": s.min_keep,
        "grammar": grammar_text(s),
        "grammar_lazy": params.trigger is not None,
        "grammar_triggers": [] if params.trigger is None else [{"type": "word", "value": params.trigger.marker}],
        "preserved_tokens": sorted(params.preserved_tokens),
        "chat_format": params.chat_format,
        "reasoning_format": params.reasoning_format,
        "reasoning_in_content": False,
        "lora": [{"id": i, "scale": scale} for i, scale in (params.lora or {}).items()],
        "samplers": [*s.samplers, ""] if params.default_samplers else list(s.samplers),
    }


def grammar_text(sampling: SamplingParams) -> str:
    """The grammar in use as GBNF, Lark or a regular expression."""
    if sampling.regex is not None:
        return f"/{sampling.regex}/"
    if sampling.json_schema is None:
        return sampling.grammar
    return schema_grammar(sampling.json_schema)


@functools.lru_cache(maxsize=16)
def schema_grammar(schema: str) -> str:
    """GBNF of a JSON schema; answers and slots show it again and again. Raises GrammarError."""
    from ikpy.engine.grammars.grammar import parsed_schema
    from ikpy.engine.grammars.json_schema import schema_to_gbnf

    return schema_to_gbnf(parsed_schema(schema))


def default_params(settings: ServerSettings) -> GenerationParams:
    """Parameters a fresh slot shows."""
    return GenerationParams(
        sampling=dataclasses.replace(settings.sampling, seed=RANDOM_SEED),
        stream=True,
        default_samplers=settings.default_samplers,
        reasoning_format="none",
    )
