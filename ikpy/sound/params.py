"""Sizes and settings of an encoder of sound, from the clip.audio.* keys of a projector file."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.models.keys import Keys
from ikpy.vision.params import EncoderParams, size

PART = "audio"
MAX_MEL = 256


@dataclass(frozen=True)
class SoundParams(EncoderParams):
    """What every encoder of sound is told. n_mel: pitches of a spectrogram."""

    n_mel: int

    @classmethod
    def read(cls, keys: Keys) -> SoundParams:
        """Raises FileFormatError for keys that are missing or make no sense."""
        n_mel = size(keys, "num_mel_bins", most=MAX_MEL, part=PART)
        return cls(**cls.read_common(keys, PART), activation="gelu_erf", n_mel=n_mel)
