"""Sounds from files, their contents, base64 and arrays."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy.errors import UsageError
from ikpy.tools.media import Media
from ikpy.tools.pictures import from_base64, read_media_file

if TYPE_CHECKING:
    from ikpy.sound.samples import Samples


class Sound(Media):
    """A sound; ``content`` is its samples float32 [n], 16000 a second."""

    what = "audio"

    @classmethod
    def of_file(cls, data: bytes, name: str = "audio") -> Sound:
        """The sound of a file's content. It is decoded at once, and again when rows of it are made a second time.

        Raises an IkpyError that calls it by the name.
        """
        from ikpy.sound.samples import decode_sound

        read = partial(decode_sound, data, name)
        return cls(hashlib.sha256(data).digest(), read, read())

    @classmethod
    def of_samples(cls, samples: Samples) -> Sound:
        """A sound that is decoded already."""
        return cls(hashlib.sha256(b"samples\n" + samples.tobytes()).digest(), lambda: samples)


def read_sound(path: str) -> Sound:
    """The sound in a file. Raises an IkpyError that names it."""
    return Sound.of_file(read_media_file(path), path)


def sound_from(value: Any) -> Sound:
    """A sound given as the name of a file, its content, or samples, an array of floats [n], 16000 a second.

    Raises an IkpyError.
    """
    from ikpy.sound.samples import MAX_SECONDS, SAMPLE_RATE, are_sound

    if isinstance(value, str) and value.startswith("data:"):
        value = from_base64(value.partition(",")[2])
    if isinstance(value, (str, os.PathLike)):
        return read_sound(os.fspath(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Sound.of_file(bytes(value))
    samples = np.asarray(value)
    if samples.dtype.kind != "f" or samples.ndim != 1 or not samples.size or not are_sound(samples):
        raise UsageError("a sound is a file, bytes of one, or an array of floats [n], 16000 samples a second")
    if len(samples) > MAX_SECONDS * SAMPLE_RATE:
        raise UsageError(f"the sound is longer than {MAX_SECONDS} seconds")
    return Sound.of_samples(np.ascontiguousarray(samples, np.float32))
