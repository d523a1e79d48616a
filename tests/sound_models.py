"""Sounds as files, and a tiny random model that hears them."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np

from tests.cpu.media.sound_towers import SoundTower
from tests.picture_models import write_text

RATE = 16000


def tone(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """A rising tone and noise, f32 [n]."""
    t = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.05, len(t))
    return (0.5 * np.sin(2 * np.pi * (300 + 100 * seed + 200 * t) * t) + noise).clip(-1, 1).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """A WAV file of samples [n] or [n, channels], 16 bits."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.rint(samples * 32767).astype("<i2").tobytes())
    return out.getvalue()


def write_sound_projector(path: Path, d: int = 64, kind: str = "ultravox") -> Path:
    """A projector of sound for text models with d channels; 48 rows for each 30 seconds."""
    tower = SoundTower(kind, d=32, heads=2, ff=32, layers=1, text=d, stack=31)
    weights = tower.weights()
    weights["mm.a.mlp.2.weight"] *= 20  # answers differ
    return tower.write(path, weights)


def write_hearing_model(folder: Path) -> None:
    """text.gguf and mmproj.gguf."""
    write_text(folder / "text.gguf")
    write_sound_projector(folder / "mmproj.gguf")
