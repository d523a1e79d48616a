"""Which value of config.json is none that its key can have, when converting failed for one."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_SHOWN = 40
# Integers become 32 bits, numbers float32.
_MOST = defaultdict(lambda: 1 << 31, {"a number": 3.4e38})

# The first pattern that a key matches says what it holds.
_KINDS = (
    ("object", r"id2label|label2id|auto_map|.*_(config|cfg)|rope_(scaling|parameters)|(full|sliding)_attention"),
    (
        "text",
        r"hybrid_override_pattern|.*_act|activation|.*activation(_func(tion)?)?|granularity.*|.*_granularity_type",
    ),
    ("text", r"(torch_)?dtype|model_type|type|.*_(func|function|proj|type|method|mode|enum|version)"),
    ("list", r"architectures|.*layer_types|.*_layer_ids|.*_idxs|.*_indexes|(.*_)?(short|long)_factor"),
    ("list", r"(full_attn|kda|attn|moe|dense|sparse|mlp_only)_layers"),
    ("flag", r"(use|tie|is|has|do|no)_.*|.*_(bias|norm|topk_prob|gate|adjust_ff_dim)|.*interleave"),
    ("number", r"factor|beta_.*|mscale.*|(.*_)?(theta|eps|epsilon|factor|base|scale|scaling|ratio|alpha|beta|prob)"),
    ("number", r"(.*_)?(multiplier|softcapping|softcap|cap|bound|limit|temperature|dropout|clip_qkv)"),
    (
        "integer",
        r"((.*_)?num|n|max|d|first|topk)_.*|(.*_)?(size|dim|rank|heads?|layers|experts|kernel|length|embeddings|expand)",
    ),
    (
        "integer",
        r".*_(embeddings|groups?|top_?k|interval|window|d_conv|d_state|d_ssm|of|state|cache|step|stride|per_tok(en)?)",
    ),
)
_OF_SEVERAL_TYPES = re.compile(
    r"mamba_dt_rank|time_step_limit|.*_per_layer|altup_correct_scale|.*_block_size|no_rope_layer.*"
)
# -1 stands for none.
_BELOW_ZERO = frozenset(("sliding_window",))
_PATTERNS = tuple((re.compile(pattern), kind) for kind, pattern in _KINDS)


class Kind(NamedTuple):
    """What a key holds; ``may_be``: whether a value, which is not None, is of that type."""

    words: str
    may_be: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


KINDS = {
    "object": Kind("an object", lambda value: isinstance(value, dict)),
    "text": Kind("a string", lambda value: isinstance(value, str)),
    "list": Kind("a list", lambda value: isinstance(value, list)),
    "flag": Kind("true or false", lambda value: isinstance(value, bool)),
    "number": Kind("a number", _is_number),
    "integer": Kind("an integer", _is_integer),
}


def shown(value: Any) -> str:
    """A value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def kind_of(key: str) -> Kind | None:
    """What a key holds by its name; None for names that say nothing."""
    if _OF_SEVERAL_TYPES.fullmatch(key):
        return None
    return next((KINDS[kind] for pattern, kind in _PATTERNS if pattern.fullmatch(key)), None)


def _values(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values; without those of the quantization, whose readers say what is wrong."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, dict) and key != "quantization_config":
            yield from _values(value)


def odd_value(config: dict[str, Any], error: Exception | None = None) -> str | None:
    """Words for the value that most probably made converting fail: one of another type, a list for one number, NaN or
    infinity, a number below 0 or beyond 32 bits, 0 where was divided. None if all look possible.

    Names tell types well enough to explain a failure, and not to refuse what is converted.
    """
    suspects: list[tuple[int, str]] = []
    for key, value in _values(config):
        kind = kind_of(key)
        if kind is None or value is None:
            continue
        words = f"'{key}' is {shown(value)}"
        entries = value if isinstance(value, list) else [value]
        has_gaps = isinstance(value, list) and any(entry is None for entry in value)
        entries = [entry for entry in entries if entry is not None]
        if not kind.may_be(value) and not (entries and all(map(kind.may_be, entries))):
            suspects.append((0, f"{words}, not {kind.words}"))
        elif has_gaps:
            suspects.append((0, f"{words}, with nothing in it at some places"))
        elif any(_is_number(entry) and not abs(entry) < _MOST[kind.words] for entry in entries):
            suspects.append((1, f"{words}, not a number that is possible"))
        elif kind.words == "an integer" and key not in _BELOW_ZERO and any(entry < 0 for entry in entries):
            suspects.append((2, f"{words}, below 0"))
        elif error is not None and kind.words == "an integer" and isinstance(value, list):
            suspects.append((3, f"{words}, not {kind.words}"))
        elif isinstance(error, ZeroDivisionError) and kind.words == "an integer" and value == 0:
            suspects.append((4, f"{words}, which cannot be 0"))
    return min(suspects, key=lambda suspect: suspect[0])[1] if suspects else None
