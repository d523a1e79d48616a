"""Conversion of the values of options that choose tokens; see `ikpy.cli.values`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ikpy.cli.values import Warn, to_float
from ikpy.engine.sampling_params import DEFAULT_SAMPLERS

SAMPLER_LETTERS = dict(zip("dkfypmxntw", DEFAULT_SAMPLERS, strict=True)) | {"s": "top_n_sigma", "e": "penalties"}
PENALTIES_FIRST = "penalties always come first; switch them off with --repeat-penalty 1 and the like"
SAMPLER_ALIASES = {
    "temp": "temperature",
    "tfs": "tfs_z",
    "typical": "typical_p",
    "typ_p": "typical_p",
    "top_sigma": "top_n_sigma",
    "top_nsigma": "top_n_sigma",
    "nucleus": "top_p",
}


def to_temperature(text: str, warn: Warn) -> float:
    """Temperature, negative read as 0 (greedy)."""
    return max(to_float(text, warn), 0.0)


def to_samplers(text: str, warn: Warn) -> tuple[str, ...]:
    """Sampler names separated by `;`."""
    names = []
    for part in filter(None, text.split(";")):
        name = part.strip().lower().replace("-", "_")
        name = SAMPLER_ALIASES.get(name, name)
        if name not in (*DEFAULT_SAMPLERS, "penalties"):
            raise ValueError(f"unknown sampler {part!r} (known: {', '.join(DEFAULT_SAMPLERS)})")
        names.append(name)
    return without_penalties(names, warn)


def without_penalties(names: Sequence[str], warn: Warn) -> tuple[str, ...]:
    """Samplers behind the penalties, which come before all others wherever they are named."""
    if "penalties" in names[1:]:
        warn(PENALTIES_FIRST)
    return tuple(name for name in names if name != "penalties")


def to_sampler_letters(text: str, warn: Warn) -> tuple[str, ...]:
    """Samplers by their letters, `dkfypmxntw` for the default order."""
    unknown = [letter for letter in text if letter not in SAMPLER_LETTERS]
    if unknown:
        raise ValueError(f"unknown sampler letter {unknown[0]!r} (known: {''.join(SAMPLER_LETTERS)})")
    return without_penalties([SAMPLER_LETTERS[letter] for letter in text], warn)


def to_logit_bias(text: str, warn: Warn) -> tuple[int, float]:
    """`ID+V` or `ID-V`; V may be inf."""
    match = re.fullmatch(r"(\d+)([+-].+)", text)
    if not match:
        raise ValueError(f"expected TOKEN_ID(+/-)BIAS, got {text!r}")
    bias = to_float(match[2], warn)
    if math.isnan(bias):
        raise ValueError(f"expected a number or inf behind the token, got {text!r}")
    return int(match[1]), bias


def to_sequence_breakers(text: str, warn: Warn) -> list[str]:
    """Every character of the text; none for the word `none`."""
    return [] if text == "none" else list(text)
