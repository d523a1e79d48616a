"""Which layers of a model attend to a window."""

from __future__ import annotations

from ikpy.models.keys import Keys


def window_layers(keys: Keys, n_layer: int, period: int) -> list[bool]:
    """Whether each layer has a window: attention.sliding_window_pattern of the file, else all but every period-th.

    The key holds a flag per layer.
    """
    name = "attention.sliding_window_pattern"
    if keys.has(name):
        return [bool(flag) for flag in keys.per_layer(name, n_layer)]
    return [(il + 1) % period != 0 for il in range(n_layer)]
