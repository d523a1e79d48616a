"""Pitches of spectrograms by Slaney's scale, written without ikpy's code."""

from __future__ import annotations

import math

import numpy as np

RATE = 16000


def slaney_hertz(mel: np.ndarray) -> np.ndarray:
    """Frequencies of places of Slaney's scale."""
    return np.where(mel < 15, 200 / 3 * mel, 1000 * 6.4 ** ((mel - 15) / 27))


def filters(n_mel: int, n_fft: int) -> np.ndarray:
    """Triangles of area 1 [n_mel, n_fft / 2 + 1], made point by point."""
    top = 15 + 27 * math.log(8) / math.log(6.4)
    corners = slaney_hertz(np.linspace(0, top, n_mel + 2))
    found = np.zeros((n_mel, n_fft // 2 + 1))
    for i, (low, middle, high) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
        for j in range(found.shape[1]):
            f = j * RATE / n_fft
            if low < f < high:
                share = (f - low) / (middle - low) if f <= middle else (high - f) / (high - middle)
                found[i, j] = share * 2 / (high - low)
    return found
