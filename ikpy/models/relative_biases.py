"""Biases of attention by the difference of positions, in buckets (T5, arXiv:1910.10683)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.altup import own_weight
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource

FARTHEST = 128
"""Differences from here on share a bucket; no file says another number."""
KEY = "attention.relative_buckets_count"


def read_buckets(keys: Keys) -> int:
    """Number of buckets. FileFormatError for one of which no half holds single differences."""
    n = int(keys.u32(KEY))
    if not 4 <= n < 2 * FARTHEST:
        raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.{KEY} is {n}; 4 to {2 * FARTHEST - 1} are possible")
    return n


def buckets(n: int, *, both_ways: bool) -> NDArray[np.int64]:
    """Bucket of n of every position of a cell less that of a token, from -FARTHEST to FARTHEST.

    Half of them have one difference each, the others grow like powers. both_ways: cells behind the token have half of
    all buckets, instead of that of the token itself. In float32, as published: some differences are limits.
    """
    difference = np.arange(-FARTHEST, FARTHEST + 1)
    first = np.zeros_like(difference)
    if both_ways:
        n //= 2
        first = np.where(difference > 0, n, 0)
        distance = np.abs(difference)
    else:
        distance = np.maximum(-difference, 0)
    single = n // 2
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(single)) / np.float32(
        math.log(FARTHEST / single)
    )
    grown = single + (ratio * np.float32(n - single)).astype(np.int64)
    return first + np.where(distance < single, distance, np.minimum(grown, n - 1))


def take_biases(weights: WeightSource, name: str, n_head: int, n: int, *, both_ways: bool) -> Value | None:
    """The tensor [H, n] as biases f32 [2 * FARTHEST + 1, H] of differences; None if the file does not have it."""
    values = weights.array(name, n_head, n)
    if values is None:
        return None
    of_differences = np.ascontiguousarray(values.reshape(n, n_head)[buckets(n, both_ways=both_ways)].T)
    return own_weight(weights, f"{name} by difference", of_differences)
