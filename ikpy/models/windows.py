"""Which layers of a model attend to a window."""

from __future__ import annotations

from ikpy.models.keys import Keys

NAME = "attention.sliding_window_pattern"


def window_layers(keys: Keys, n_layer: int, period: int) -> list[bool]:
    """Whether each layer has a window: attention.sliding_window_pattern of the file, else all but every period-th.

    The key holds a flag per layer.
    """
    if keys.has(NAME):
        return [bool(flag) for flag in keys.per_layer(NAME, n_layer)]
    return [(il + 1) % period != 0 for il in range(n_layer)]


def periodic_windows(keys: Keys, n_layer: int, *, full_first: bool = False) -> list[bool]:
    """As window_layers, but the key must be there, and a number says every how manyth layer has no window.

    That layer is the last of so many, or the first if full_first.
    """
    if keys.is_list(NAME):
        return [bool(flag) for flag in keys.per_layer(NAME, n_layer)]
    period = keys.u32(NAME)
    full = 0 if full_first else period - 1
    return [not period or il % period != full for il in range(n_layer)]
