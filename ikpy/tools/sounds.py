"""Sounds from files, their contents, base64 and arrays."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy.errors import UsageError
from ikpy.tools.media import Media

if TYPE_CHECKING:
    from ikpy.sound.samples import Samples


class Sound(Media):
    """A sound; ``content`` is its samples float32 [n], 16000 a second."""

    what = "audio"

    @property
    def n_samples(self) -> int | None:
        """Samples of the content, as far as it is kept."""
        return None if self._content is None else len(self._content)

    @staticmethod
    def decode(data: bytes, name: str) -> Samples:
        from ikpy.sound.samples import decode_sound

        return decode_sound(data, name)

    @classmethod
    def of_samples(cls, samples: Samples) -> Sound:
        """A sound that is decoded already."""
        return cls(hashlib.sha256(b"samples\n" + samples.tobytes()).digest(), lambda: samples)


def sound_from(value: Any) -> Sound:
    """A sound given as the name of a file, its content, or samples, an array of floats [n], 16000 a second.

    Raises an IkpyError.
    """
    from ikpy.sound.samples import MAX_SECONDS, SAMPLE_RATE, are_sound

    if sound := Sound.of_given(value):
        return sound
    samples = np.asarray(value)
    if samples.dtype.kind != "f" or samples.ndim != 1 or not samples.size or not are_sound(samples):
        raise UsageError("a sound is a file, bytes of one, or an array of floats [n], 16000 samples a second")
    if len(samples) > MAX_SECONDS * SAMPLE_RATE:
        raise UsageError(f"the sound is longer than {MAX_SECONDS} seconds")
    return Sound.of_samples(np.ascontiguousarray(samples, np.float32))
