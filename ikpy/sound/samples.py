"""Sound from the bytes of its files, as samples of one channel."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ikpy.errors import FileFormatError, ResourceError, UsageError

SAMPLE_RATE = 16000
"""Samples per second that encoders hear."""
MAX_SECONDS = 3600
"""Of the longest sound that is decoded: an hour becomes 45000 tokens or more."""
FORMATS = ("WAV", "FLAC", "MP3")
STEP = SAMPLE_RATE * 10
"""Samples that are decoded at a time."""
LOUDEST = 1e12
"""Of samples, whose powers are floats; sounds of 32 bits that are not divided by their range stay far below."""

Samples = NDArray[np.float32]
"""Sound [n], SAMPLE_RATE samples a second, from -1 to 1."""


def is_sound(data: bytes) -> bool:
    """Whether a file begins as one of FORMATS."""
    if data[:4] == b"RIFF":
        return data[8:12] == b"WAVE"
    # Bits 1 and 2 are the layer of MPEG, 0 in AAC.
    is_mp3 = data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 6 != 0)
    return data[:4] == b"fLaC" or is_mp3


def decode_sound(data: bytes, name: str = "audio") -> Samples:
    """The sound of a file, its channels mixed; decoded and resampled by miniaudio, as in llama.cpp.

    name: what errors call it. Raises FileFormatError for what is no sound or is damaged, ResourceError for one that is
    too long.
    """
    if not data:
        raise UsageError(f"{name} is empty: give a sound ({', '.join(FORMATS)})")
    if not is_sound(data):
        raise FileFormatError(f"{name} is no sound of a known format ({', '.join(FORMATS)})")
    parts: list[NDArray[np.float32]] = []
    n = 0
    for part in _decoded(data, name):
        parts.append(np.array(part, np.float32))
        n += len(part)
        if n > MAX_SECONDS * SAMPLE_RATE:
            raise ResourceError(f"{name} is longer than {MAX_SECONDS} seconds, the most that are decoded")
    if not n:
        raise FileFormatError(f"{name} has no samples")
    samples = np.concatenate(parts)
    if not are_sound(samples):
        raise FileFormatError(f"{name} has samples that are no numbers or above {LOUDEST:g}")
    return samples


def are_sound(samples: NDArray[np.floating]) -> bool:
    """Whether these may be samples."""
    return bool(samples.min() >= -LOUDEST and samples.max() <= LOUDEST)


def _decoded(data: bytes, name: str) -> Iterator[array.array]:
    """Samples in order."""
    try:
        import miniaudio  # late: text needs none of it
    except ImportError as error:
        raise UsageError(f"sound needs the package miniaudio (pip install miniaudio): {error}") from None
    info = {b"RIFF": miniaudio.wav_get_info, b"fLaC": miniaudio.flac_get_info}.get(data[:4])
    try:
        if info is not None:
            _check_opens(info, data)
        yield from miniaudio.stream_memory(
            data, miniaudio.SampleFormat.FLOAT32, nchannels=1, sample_rate=SAMPLE_RATE, frames_to_read=STEP
        )
    except miniaudio.MiniaudioError as error:
        raise FileFormatError(f"{name} cannot be decoded: {error.args[0] if error.args else 'damaged'}") from None


def _check_opens(info: Callable[[bytes], object], data: bytes) -> None:
    """Raises DecodeError for a damaged file, which would be tried as other formats: noise passes for MP3."""
    import miniaudio

    try:
        info(data)
    except miniaudio.DecodeError:
        raise
    except (miniaudio.MiniaudioError, ZeroDivisionError):
        pass  # it opens, but the answer has no name for the width of its samples, or no duration
