"""Logarithmic mel spectrograms (arXiv:2212.04356): how strong the pitches are that ears tell apart, over time."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ikpy.sound.samples import SAMPLE_RATE, Samples

WINDOW, HOP = 400, 160
"""Samples of a window, and from the middle of one to that of the next."""
LOUDNESS_RANGE = 8.0
"""What lies further below the loudest, in powers of ten, counts as that."""
LEAST_POWER = 1e-10
BLOCK = 3000
"""Windows that are transformed at a time."""

# Slaney's scale: linear below 1000 Hz, logarithmic above.
LINEAR_STEP, BREAK_HERTZ, LOG_STEP = 200 / 3, 1000.0, math.log(6.4) / 27
HTK_BREAK = 700.0
"""The scale of HTK is logarithmic in 1 + f / 700 Hz."""


def _mel(hertz: float) -> float:
    """Place on the scale."""
    if hertz < BREAK_HERTZ:
        return hertz / LINEAR_STEP
    return BREAK_HERTZ / LINEAR_STEP + math.log(hertz / BREAK_HERTZ) / LOG_STEP


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """Frequencies of places on the scale."""
    above = BREAK_HERTZ * np.exp(LOG_STEP * (mel - BREAK_HERTZ / LINEAR_STEP))
    return np.where(mel < BREAK_HERTZ / LINEAR_STEP, mel * LINEAR_STEP, above)


def _triangles(corners: NDArray[np.float64], n_fft: int) -> NDArray[np.float64]:
    """Triangles of height 1 [len(corners) - 2, n_fft / 2 + 1] between three corners each."""
    bins = np.linspace(0, SAMPLE_RATE / 2, n_fft // 2 + 1)
    widths = np.diff(corners)
    slopes = corners[:, None] - bins
    return np.maximum(np.minimum(-slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]), 0)


@cache
def mel_filters(n_mel: int, n_fft: int = WINDOW) -> NDArray[np.float32]:
    """Triangles of the same area [n_mel, n_fft / 2 + 1] over the frequencies of a transform."""
    corners = _hertz(np.linspace(0, _mel(SAMPLE_RATE / 2), n_mel + 2))
    return (_triangles(corners, n_fft) * (2 / (corners[2:] - corners[:-2]))[:, None]).astype(np.float32)


@cache
def htk_filters(n_mel: int, n_fft: int, low: float = 0, high: float = SAMPLE_RATE / 2) -> NDArray[np.float32]:
    """Triangles of height 1 over the frequencies of a transform, by the scale of HTK, between two frequencies."""
    ends = math.log1p(low / HTK_BREAK), math.log1p(high / HTK_BREAK)
    return _triangles(HTK_BREAK * np.expm1(np.linspace(*ends, n_mel + 2)), n_fft).astype(np.float32)


@cache
def hann(n: int, *, periodic: bool = True) -> NDArray[np.float64]:
    """The window of von Hann; one that is not periodic ends as it begins."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n) / (n if periodic else n - 1))


def mel_powers(samples: Samples, n_mel: int, n_frames: int, *, mirrored: bool = False) -> NDArray[np.float32]:
    """Powers [n_frames, n_mel] of windows, the middle of the first being the first sample. Before the sound lies its
    reflection, behind it silence, or another reflection if it is mirrored."""
    half = WINDOW // 2
    before = np.pad(samples[: half + 1], (0, max(0, half + 1 - len(samples))))[:0:-1]
    after = samples[-2 : -half - 2 : -1] if mirrored else samples[:0]
    n_needed = (n_frames - 1) * HOP + WINDOW
    line = np.concatenate([before, samples, after])[:n_needed]
    line = np.pad(line, (0, n_needed - len(line)))
    windows = np.lib.stride_tricks.sliding_window_view(line, WINDOW)[::HOP]
    filters, window = mel_filters(n_mel).T, hann(WINDOW)
    found = np.empty((n_frames, n_mel), np.float32)
    for start in range(0, n_frames, BLOCK):
        powers = np.abs(np.fft.rfft(windows[start : start + BLOCK] * window)) ** 2
        found[start : start + BLOCK] = powers.astype(np.float32) @ filters
    return found


def centred_powers(
    samples: Samples, n_frames: int, window: NDArray[np.float64], filters: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Powers [n_frames, n_mel] of transforms as long as the filters say, the window in the middle of each. The middle
    of the first is sample n_fft / 2; silence lies behind the last."""
    n_fft = 2 * (filters.shape[1] - 1)
    n_needed = (n_frames - 1) * HOP + n_fft
    line = np.pad(samples[:n_needed], (0, max(0, n_needed - len(samples))))
    windows = np.lib.stride_tricks.sliding_window_view(line, n_fft)[::HOP]
    before = (n_fft - len(window)) // 2
    wide = np.pad(window, (before, n_fft - len(window) - before))
    found = np.empty((n_frames, len(filters)), np.float32)
    for start in range(0, n_frames, BLOCK):
        powers = np.abs(np.fft.rfft(windows[start : start + BLOCK] * wide)) ** 2
        found[start : start + BLOCK] = powers.astype(np.float32) @ filters.T
    return found


def loudness(powers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Levels of powers as Whisper hears them, about -1 to 1."""
    levels = np.log10(np.maximum(powers, np.float32(LEAST_POWER)))
    return (np.maximum(levels, levels.max() - np.float32(LOUDNESS_RANGE)) + 4) / 4


def whisper_spectrogram(samples: Samples, n_mel: int, n_frames: int, *, mirrored: bool = False) -> NDArray[np.float32]:
    """What the encoder of Whisper hears of the first n_frames windows, [n_frames, n_mel], about -1 to 1."""
    return loudness(mel_powers(samples, n_mel, n_frames, mirrored=mirrored))


def htk_levels(samples: Samples, n_mel: int, n_frames: int, window: int, floor: float) -> NDArray[np.float32]:
    """Natural logarithms [n_frames, n_mel] of the strength of pitches, the floor added to it. The middle of the first
    window is the first sample; silence lies before it and behind the last."""
    n_fft = 1 << (window - 1).bit_length()
    n_needed = (n_frames - 1) * HOP + window
    line = np.concatenate([np.zeros(window // 2, np.float32), samples])[:n_needed]
    line = np.pad(line, (0, n_needed - len(line)))
    windows = np.lib.stride_tricks.sliding_window_view(line, window)[::HOP]
    strengths = np.abs(np.fft.rfft(windows * hann(window), n_fft)).astype(np.float32)
    return np.log(strengths @ htk_filters(n_mel, n_fft).T + np.float32(floor))
