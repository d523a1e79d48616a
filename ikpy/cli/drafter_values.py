"""Conversion of the values of options of drafters; see `ikpy.cli.values`."""

from __future__ import annotations

from typing import Any

from ikpy.cli.values import Convert, Warn, bounded, to_float

DRAFT_SETTINGS: dict[str, Convert] = {
    "n_max": bounded(0),
    "n_min": bounded(0),
    "p_min": to_float,
    "size_n": bounded(1),
    "size_m": bounded(1),
    "min_hits": bounded(1),
    "pattern_len": bounded(1),
    "max_depth": bounded(1),
}


def draft_setting(name: str) -> Convert:
    """Converter to a (name, value) pair of the speculative settings."""

    def convert(text: str, warn: Warn) -> tuple[str, Any]:
        return name, DRAFT_SETTINGS[name](text, warn)

    return convert


def to_draft_settings(text: str, warn: Warn) -> list[tuple[str, Any]]:
    """`key=value[,key=value...]` with the keys of DRAFT_SETTINGS."""
    settings = []
    for item in text.split(","):
        name, equals, value = item.partition("=")
        name = name.strip().replace("-", "_")
        if name not in DRAFT_SETTINGS or not equals:
            raise ValueError(f"expected key=value with a key of {', '.join(DRAFT_SETTINGS)}, got {item!r}")
        try:
            settings.append((name, DRAFT_SETTINGS[name](value, warn)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return settings


SPECULATION_ALIASES = {"draft-simple": "draft", "draft-mtp": "mtp", "draft-eagle3": "eagle3"}
SPECULATION_ALIASES |= {f"draft-{name}": name for name in ("dflash", "dspark")}


def to_speculation(text: str, warn: Warn) -> list[str]:
    """`TYPE[:key=value,...]`, or several types separated by commas; the settings are checked here, applied later."""
    head, colon, settings = text.partition(":")
    names = [name.strip().lower().replace("_", "-") for name in head.split(",") if name.strip()]
    names = [SPECULATION_ALIASES.get(name, name) for name in names]
    if colon:
        to_draft_settings(settings, warn)
        return [f"{','.join(names)}:{settings}"]
    return names
