"""The random encoders of sound that tests have of every kind of projector, and their sounds."""

from __future__ import annotations

import numpy as np

from tests.cpu.sound_towers import SoundTower
from tests.shared import DATA
from tests.sound_models import tone

GOLDENS = DATA / "sound"
GOLDEN_ROWS = (0, 7, 20, -1)
PEER_ROWS = (0, 3, -1)
PEER_COLUMNS = 32
TEXT_AROUND = {
    "ultravox": ("", ""),
    "qwen2a": ("<|audio_bos|>", "<|audio_eos|>"),
    "voxtral": ("[BEGIN_AUDIO]", ""),
    "musicflamingo": ("<sound>", ""),
}
TOWERS = {
    "ultravox": SoundTower("ultravox", d=80, heads=2, stack=8),
    "qwen2a": SoundTower("qwen2a", mel=128),
    "voxtral": SoundTower("voxtral", d=80, mel=128, stack=4),
    "musicflamingo": SoundTower("musicflamingo"),
}
IN_TRANSFORMERS = ("qwen2a", "voxtral", "musicflamingo")
LIKE_LLAMA_CPP = ("ultravox", "qwen2a", "musicflamingo")
"""Of Voxtral it makes other rows than the model does."""


def sounds() -> list[np.ndarray]:
    """A short one, and one that goes on in a second piece."""
    return [tone(2.5, 1), tone(30.5, 2)]
