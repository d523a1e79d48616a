"""Which layers of a model attend to a window."""

from __future__ import annotations

from typing import Any

from ikpy.models.keys import REQUIRED, Keys

PATTERN = "attention.sliding_window_pattern"


def window_layers(keys: Keys, n_layer: int, period: int) -> list[bool]:
    """Whether each layer has a window: attention.sliding_window_pattern of the file, else all but every period-th.

    The key holds a flag per layer.
    """
    if keys.has(PATTERN):
        return [bool(flag) for flag in keys.per_layer(PATTERN, n_layer)]
    return usual_window_layers(n_layer, period)


def usual_window_layers(n_layer: int, period: int) -> list[bool]:
    """All layers but every period-th have a window."""
    return [(il + 1) % period != 0 for il in range(n_layer)]


def periodic_window_layers(keys: Keys, n_layer: int, period: Any = REQUIRED, *, full_first: bool = False) -> list[bool]:
    """As `window_layers`, of files whose attention.sliding_window_pattern may be a number, the period itself (0: all
    layers have a window). full_first: layers without a window are the first of their periods, not the last.
    """
    if keys.is_list(PATTERN):
        return window_layers(keys, n_layer, period=1)
    period = keys.u32(PATTERN, period)
    full = 0 if full_first else period - 1
    return [not period or il % period != full for il in range(n_layer)]
