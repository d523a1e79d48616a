"""Hyper-connections and compressed cells by their definitions, in float64."""

from __future__ import annotations

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x)."""
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """e^x as shares of its sum."""
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def weights(
    mix: np.ndarray, base: np.ndarray, scale: np.ndarray, n: int, iterations: int, eps: float, magnitude: float = 2.0
) -> np.ndarray:
    """mix [T, (2 + n) * n] -> as many weights: of the sum, of the output, and the matrix [j, k].

    [T, n] and [T, 2 * n] give the first of these alone.
    """
    mix, base, scale = (x.astype(np.float64) for x in (mix, base, scale))
    pre = sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
    if mix.shape[1] == n:
        return pre
    post = magnitude * sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    if mix.shape[1] == 2 * n:
        return np.concatenate([pre, post + eps], axis=1)
    matrix = softmax((mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + eps
    matrix /= matrix.sum(1, keepdims=True) + eps
    for _ in range(iterations - 1):
        matrix /= matrix.sum(2, keepdims=True) + eps
        matrix /= matrix.sum(1, keepdims=True) + eps
    return np.concatenate([pre, post, matrix.reshape(-1, n * n)], axis=1)


def collapse(streams: np.ndarray, w: np.ndarray) -> np.ndarray:
    """streams [T, n, D], weights [T, ..] -> [T, D]."""
    return np.einsum("tnd,tn->td", streams.astype(np.float64), w[:, : streams.shape[1]].astype(np.float64))


def expand(streams: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """streams [T, n, D], y [T, D], weights [T, (2 + n) * n], or [T, 2 * n] of streams that stay -> [T, n, D]."""
    n = streams.shape[1]
    if w.shape[1] == 2 * n:
        return streams.astype(np.float64) + w[:, n:, None].astype(np.float64) * y[:, None].astype(np.float64)
    post, matrix = w[:, n : 2 * n].astype(np.float64), w[:, 2 * n :].reshape(-1, n, n).astype(np.float64)
    mixed = np.einsum("tjk,tjd->tkd", matrix, streams.astype(np.float64))
    return mixed + post[:, :, None] * y[:, None].astype(np.float64)


def compressed(
    values: np.ndarray,
    gates: np.ndarray,
    bias: np.ndarray,
    place: dict[tuple[int, int], int],
    stretches: list[tuple[int, int] | None],
    size: int,
) -> np.ndarray:
    """values, gates [cells, w], bias [ratio, w] -> an entry [size] for the last position and sequence of a stretch.

    place: the cell of a position and sequence. None, or a stretch without cells, gives zeros.
    """
    values, gates, bias = (x.astype(np.float64) for x in (values, gates, bias))
    ratio, out = len(bias), np.zeros((len(stretches), size))
    for row, stretch in zip(out, stretches, strict=True):
        if stretch is None:
            continue
        last, sequence = stretch
        found = []
        for o in range(ratio):
            if values.shape[1] > size:
                found.append((last - 2 * ratio + 1 + o, slice(0, size), bias[o, :size]))
            found.append((last - ratio + 1 + o, slice(values.shape[1] - size, None), bias[o, -size:]))
        cells = [(place[p, sequence], part, b) for p, part, b in found if (p, sequence) in place]
        if cells:
            share = softmax(np.stack([gates[c, part] + b for c, part, b in cells]), 0)
            row[:] = (share * np.stack([values[c, part] for c, part, _ in cells])).sum(0)
    return out
