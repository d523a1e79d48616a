"""Parameters of a generation from a request body; wrong kinds of fields get 400."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ikpy.engine.grammars.grammar import LARK_MARK, NO_FORCING
from ikpy.engine.sampling import SamplingParams, sampler_sequence, sampler_sequence_from_letters
from ikpy.errors import UsageError
from ikpy.server.errors import ApiError, bad_request
from ikpy.server.params import GenerationParams
from ikpy.server.structured import with_structured

if TYPE_CHECKING:
    from ikpy.server.ban_patterns import BanPatterns
    from ikpy.server.phrase_ban import BannedPhrases
    from ikpy.server.settings import ServerSettings
    from ikpy.vocab import Vocab

Body = Mapping[str, Any]
FLOATS = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "tfs_z", "typical_p", "top_n_sigma",
    "xtc_probability", "xtc_threshold", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier",
    "dry_base", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
)  # fmt: skip
INTEGERS = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "min_keep")
FLAGS = ("penalize_nl", "adaptive_updt_w_cur", "ignore_eos")
OTHER_NUMBERS = (
    "max_completion_tokens", "max_tokens", "n_predict", "id_slot", "n", "n_cmpl", "n_keep", "n_discard", "n_probs",
    "seed", "n_cache_reuse", "t_max_predict_ms", "n_indent", "banned_n", "banned_bias", "banbuffer_size",
    "rewind_count_max", "speculative.n_max", "speculative.n_min", "speculative.p_min",
)  # fmt: skip
OTHER_FLAGS = ("stream", "cache_prompt", "timings_per_token", "post_sampling_probs", "return_progress", "return_tokens")
MOST_STOPS, LONGEST_STOPS = 1024, 65536
"""Stop strings of a request, and their characters together; each is looked for behind every token."""
UNSUPPORTED = {
    "system_prompt": "a system message in each request, or text before the prompt",
    "allowlist_piece_array": "grammar or logit_bias",
    "expiring_logit_bias": "logit_bias",
}
"""Fields of llama.cpp that would change the answer, and what can be used instead."""
JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool, "number": (int, float), "string": str, "array": list, "object": dict,
}  # fmt: skip
LARGEST_INTEGER = 2**31 - 1
MOST_DIGITS = 20
"""Of an id; Python converts some thousand at most."""
LARGEST_SEED = 2**32
MOST_BREAKERS = 100
"""Each is searched in all tokens of the vocabulary."""
LONGEST_BREAKERS = 65536
"""Characters of all of them together; the first 40 bytes of each count."""
MOST_SAMPLERS = 32
"""Samplers of a sequence. One that is named twice works twice (the second temperature on what the first has made), and
each takes its time for every token."""
MOST_NAMES = 1000
"""Names of samplers that are read; unknown ones are skipped."""
LARGEST_FLOAT = 1e30
"""Bound of sampling values and biases; sums and products of a few stay within 32-bit floats."""


def wrong_type(key: str, wanted: str, value: Any) -> ApiError:
    """The error for a field of another type than it must have."""
    kind = next((name for name, types in JSON_TYPES.items() if isinstance(value, types)), "null")
    return bad_request(f"Field '{key}': type must be {wanted}, but is {kind}")


def number(body: Body, key: str, default: float) -> float:
    """A number of the body, 1 and 0 for true and false; the default for another type or a value that is not finite."""
    value = body.get(key)
    if not isinstance(value, (int, float)):
        return default
    try:
        found = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return default
    return found if math.isfinite(found) else default


def bounded(value: float) -> float:
    """The value within the range of sampling values."""
    return max(-LARGEST_FLOAT, min(LARGEST_FLOAT, value))


def integer(body: Body, key: str, default: int) -> int:
    """An integer of the body, limited to 32 bits."""
    value = number(body, key, default)
    return int(max(-LARGEST_INTEGER - 1, min(LARGEST_INTEGER, value)))


def from_digits(text: str) -> int | None:
    """The number that ASCII digits stand for, limited to 32 bits; None for another text."""
    if not text.isascii() or not text.isdigit():
        return None
    return min(int(text), LARGEST_INTEGER) if len(text) <= MOST_DIGITS else LARGEST_INTEGER


def flag(body: Body, key: str, default: bool = False) -> bool:
    """A boolean of the body; the default for another type."""
    value = body.get(key)
    return value if isinstance(value, bool) else default


def wrong_types(body: Body) -> tuple[str, ...]:
    """Numbers and booleans of another type, for which the defaults are taken (tools.md, fields of requests)."""
    numbers = [name for name in (*FLOATS, *INTEGERS, *OTHER_NUMBERS) if name in body]
    flags = [name for name in (*FLAGS, *OTHER_FLAGS) if name in body]
    wrong = [name for name in numbers if not isinstance(body[name], (int, float, type(None)))]
    return tuple(wrong + [name for name in flags if not isinstance(body[name], (bool, type(None)))])


def string(body: Body, key: str) -> str:
    """A text of the body, empty without it. Raises ApiError 400 for another type."""
    value = body.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong_type(key, "string", value)
    return value


def mapping(body: Body, key: str) -> Mapping[str, Any]:
    """An object of the body, empty without it. Raises ApiError 400 for another type."""
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type(key, "object", value)
    return value


def strings(body: Body, key: str) -> tuple[str, ...] | None:
    """A list of strings (or one string); None without it. Raises ApiError 400 for anything else."""
    value = body.get(key)
    if value is None:
        return None
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise wrong_type(key, "string or array of strings", value)
    for item in items:
        if not isinstance(item, str):
            raise wrong_type(key, "array of strings", item)
    return tuple(items)


def read_generation(body: Body, settings: ServerSettings, vocab: Vocab, n_slots: int) -> GenerationParams:
    """Generation parameters of a request body. Raises ApiError 400 for values that cannot be used."""
    for name, instead in UNSUPPORTED.items():
        if body.get(name):
            raise bad_request(f"{name} is not supported: use {instead}")
    limit = -1
    for key in ("max_tokens", "max_completion_tokens", "n_predict"):
        limit = integer(body, key, limit)
    id_slot = integer(body, "id_slot", -1)
    if id_slot >= n_slots:
        raise bad_request(f"id_slot {id_slot} does not exist; slots are 0 to {n_slots - 1}")
    n = integer(body, "n_cmpl", integer(body, "n", 1))
    if not 1 <= n <= 128:
        raise bad_request(f"n must be between 1 and 128, not {n}")
    samplers = read_samplers(body)
    if not isinstance(body.get("lora"), (list, type(None))):
        raise wrong_type("lora", "array", body["lora"])
    p_min = number(body, "speculative.p_min", math.nan)
    stop = read_stop(body)
    return GenerationParams(
        sampling=read_sampling(body, settings, vocab, samplers),
        n_predict=limit,
        limit=limit if limit >= 0 else settings.n_predict,
        n_keep=integer(body, "n_keep", settings.n_keep),
        n_discard=integer(body, "n_discard", 0),
        stop=settings.stop if stop is None else stop,
        n_probs=integer(body, "n_probs", 0),
        post_sampling_probs=flag(body, "post_sampling_probs"),
        stream=flag(body, "stream"),
        cache_prompt=flag(body, "cache_prompt", settings.cache_prompt),
        cache_reuse=integer(body, "n_cache_reuse", settings.cache_reuse),
        id_slot=id_slot,
        timings_per_token=flag(body, "timings_per_token"),
        return_progress=flag(body, "return_progress") and flag(body, "stream"),
        return_tokens=flag(body, "return_tokens"),
        t_max_predict_ms=integer(body, "t_max_predict_ms", 0),
        n_indent=integer(body, "n_indent", 0),
        n=n,
        response_fields=strings(body, "response_fields") or (),
        default_samplers=settings.default_samplers and samplers is None,
        reasoning_format=settings.reasoning_format,
        draft_n_max=draft_limit(body, "speculative.n_max"),
        draft_n_min=draft_limit(body, "speculative.n_min"),
        draft_p_min=None if math.isnan(p_min) else p_min,
        lora=read_scales(body.get("lora")),
        banned=read_banned(body, settings),
        penalty_prompt=read_penalty_prompt(body.get("penalty_prompt"), vocab),
        wrong_types=wrong_types(body),
    )


def read_stop(body: Body) -> tuple[str, ...] | None:
    """Stop strings of the request; None without the field. Raises ApiError 400 for too many, or too much text."""
    stop = strings(body, "stop") if body.get("stop") != "" else None  # clients send "" for no stop string
    if stop and len(stop) > MOST_STOPS:
        raise bad_request(f"{len(stop)} stop strings are too many: at most {MOST_STOPS} are looked for")
    if stop and sum(map(len, stop)) > LONGEST_STOPS:
        raise bad_request(f"the stop strings are too long: at most {LONGEST_STOPS} characters together are looked for")
    return stop


def read_penalty_prompt(value: Any, vocab: Vocab) -> tuple[int, ...] | None:
    """Tokens of a text or of a list of ids; None without it. Ids outside the vocabulary are left out. Raises ApiError
    400 for another type."""
    if isinstance(value, str):
        return tuple(vocab.tokenize(value, add_special=False, parse_special=True))
    if isinstance(value, list):
        ids = (item for item in value if isinstance(item, int) and not isinstance(item, bool))
        return tuple(item for item in ids if 0 <= item < vocab.n_tokens)
    if value is not None:
        raise wrong_type("penalty_prompt", "string or array", value)
    return None


def read_banned(body: Body, settings: ServerSettings) -> BannedPhrases | None:
    """Phrases and patterns the request or the command line bans; None without any. Raises ApiError 400."""
    given = strings(body, "banned_strings")
    given = settings.banned_strings if given is None else given
    patterns = read_patterns(body)
    if not any(given) and patterns is None:
        return None
    from ikpy.server.phrase_ban import (
        LONGEST_PHRASE,
        LONGEST_WAIT,
        MOST_LONGEST_WAIT,
        MOST_PHRASES,
        BannedPhrases,
        folded,
    )

    if len(given) > MOST_PHRASES or max(map(len, given), default=0) > LONGEST_PHRASE:
        raise bad_request(f"banned_strings: at most {MOST_PHRASES} strings of at most {LONGEST_PHRASE} characters")
    return BannedPhrases(
        folded(given),
        integer(body, "banned_n", settings.banned_n),
        bounded(number(body, "banned_bias", BannedPhrases.bias)),
        integer(body, "rewind_count_max", BannedPhrases.n_rewinds),
        patterns,
        min(wait, MOST_LONGEST_WAIT) if (wait := integer(body, "banbuffer_size", 0)) > 0 else LONGEST_WAIT,
    )


def read_patterns(body: Body) -> BanPatterns | None:
    """Regular expressions the request bans; None without any. Raises ApiError 400."""
    names = {"banned_regex": False, "banned_regex_case_insensitive": True}
    given = [(text, ignore) for name, ignore in names.items() for text in strings(body, name) or () if text]
    if not given:
        return None
    from ikpy.server.ban_patterns import LONGEST_PATTERN, MOST_PATTERNS, BanPatterns, PatternError

    if len(given) > MOST_PATTERNS or max(len(text) for text, _ in given) > LONGEST_PATTERN:
        raise bad_request(f"banned_regex: at most {MOST_PATTERNS} patterns of at most {LONGEST_PATTERN} characters")
    try:
        return BanPatterns(given)
    except PatternError as error:
        raise bad_request(f"banned_regex: {error}") from None


def read_scales(value: Any) -> dict[int, float] | None:
    """Scales by id of `[{"id": 0, "scale": 0.5}, ...]`; None for anything but a list. What has no id is left out."""
    if not isinstance(value, list):
        return None
    items = [item for item in value if isinstance(item, dict) and isinstance(item.get("id"), int)]
    return {item["id"]: bounded(number(item, "scale", 0.0)) for item in items}


def draft_limit(body: Body, key: str) -> int | None:
    """A number of drafted tokens; None if it is not given."""
    value = integer(body, key, -1)
    return None if value < 0 else value


def read_samplers(body: Body) -> tuple[str, ...] | None:
    """Sampler order given as names or letters; None when it is not given. Raises ApiError 400 for a long one."""
    value = body.get("samplers")
    names = value if isinstance(value, str) else strings(body, "samplers")
    if names is None:
        return None
    if len(names) > MOST_NAMES:
        raise bad_request(f"{len(names)} samplers are too many: at most {MOST_NAMES} names are read")
    found = sampler_sequence_from_letters(names) if isinstance(names, str) else sampler_sequence(names)
    if len(found) > MOST_SAMPLERS:
        raise bad_request(f"{len(found)} samplers are too many: at most {MOST_SAMPLERS} are applied to a token")
    return found


def _listed(value: Any) -> Any:
    """The list in a JSON text, as SillyTavern sends it; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_sampling(
    body: Body, settings: ServerSettings, vocab: Vocab, samplers: tuple[str, ...] | None
) -> SamplingParams:
    """Sampling parameters: the server's, replaced by those of the request."""
    base = settings.sampling
    values: dict[str, Any] = {name: bounded(number(body, name, getattr(base, name))) for name in FLOATS}
    values |= {name: integer(body, name, getattr(base, name)) for name in INTEGERS}
    values |= {name: flag(body, name, getattr(base, name)) for name in FLAGS}
    values["seed"] = read_seed(body, base.seed)
    if samplers is not None:
        values["samplers"] = samplers
    if "dry_sequence_breakers" in body:
        breakers = _listed(body["dry_sequence_breakers"])
        if not isinstance(breakers, list) or not breakers or not all(isinstance(item, str) for item in breakers):
            raise bad_request("Error: dry_sequence_breakers must be a non-empty array of strings")
        if len(breakers) > MOST_BREAKERS:
            raise bad_request(f"dry_sequence_breakers: at most {MOST_BREAKERS} strings")
        if sum(map(len, breakers)) > LONGEST_BREAKERS:
            raise bad_request(f"dry_sequence_breakers: at most {LONGEST_BREAKERS} characters together")
        values["dry_sequence_breakers"] = tuple(breakers)
    if body.get("logit_bias") is not None:
        values["logit_bias"] = read_logit_bias(body["logit_bias"], vocab)
    values |= read_grammar(body)
    params = dataclasses.replace(base, **values)
    try:
        params.check()
    except UsageError as error:
        raise bad_request(str(error)) from None
    return params


def read_seed(body: Body, default: int) -> int:
    """The lower 32 bits of field ``seed``, of which a 64-bit integer must not become a float on the way."""
    value = body.get("seed")
    if not isinstance(value, int) or isinstance(value, bool):
        value = int(number(body, "seed", default))
    return value % LARGEST_SEED


def read_grammar(body: Body) -> dict[str, Any]:
    """Fields ``grammar`` (GBNF, or Lark behind ``%llguidance``), ``lark``, ``regex`` and ``json_schema``, and those of
    vLLM; giving more than one is an error."""
    body = with_structured(body)
    grammar, lark, regex = (string(body, name) for name in ("grammar", "lark", "regex"))
    schema = body.get("json_schema")
    if grammar and schema is not None:
        raise bad_request('Either "json_schema" or "grammar" can be specified, but not both')
    given = [name for name in ("grammar", "json_schema", "lark", "regex") if body.get(name)]
    if len(given) > 1:
        raise bad_request(f"{' and '.join(given)} exclude each other")
    if lark:
        grammar = lark if lark.lstrip().startswith(LARK_MARK) else f"{NO_FORCING}\n{lark}"
    if regex:
        return {"regex": regex, "grammar": "", "json_schema": None}
    if schema is not None:
        return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema), "grammar": ""}
    return {"grammar": grammar, "json_schema": None} if grammar else {}


def read_logit_bias(value: Any, vocab: Vocab) -> tuple[tuple[int, float], ...]:
    """Biases from ``[[id or text, number or false], ...]`` or ``{id or text: number}``; pairs that are neither are left
    out. Raises ApiError 400 for another type."""
    if isinstance(value, Mapping):
        pairs: list[Any] = [[_as_id(key), bias] for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = value
    else:
        if value:
            raise wrong_type("logit_bias", "object or array", value)
        return ()
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            continue
        token, bias = pair
        if bias is False:
            bias = -math.inf
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or isinstance(token, bool):
            continue
        if isinstance(token, int):
            ids = [token] if 0 <= token < vocab.n_tokens else []
        elif isinstance(token, str):
            ids = vocab.tokenize(token, add_special=False)
        else:
            continue
        found.update((i, bias if bias == -math.inf else float(bounded(bias))) for i in ids)
    return tuple(found.items())


def _as_id(text: str) -> int | str:
    number = from_digits(text)
    return text if number is None else number
